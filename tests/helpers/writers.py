"""Modules that assign the fields of classes, found in their sources.

Types come from the sources: annotations of parameters, fields, variables and results, constructors,
loops over annotated containers, and `self`. An assignment to the name of a field on an object of
unknown type is listed apart, in modules that import from the room. No assignment is passed over in
silence.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
Type = ast.expr | None  # an annotation; None where it is unknown
Scope = dict[str, Type]

CONTAINERS = {
    "Collection",
    "Generator",
    "Iterable",
    "Iterator",
    "Sequence",
    "deque",
    "frozenset",
    "list",
    "set",
    "tuple",
}
MAPPINGS = {"Mapping", "MutableMapping", "defaultdict", "dict"}
WRAPPERS = {"Annotated", "ClassVar", "Final", "InitVar", "Optional"}
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}
# Decorators under which a call gives the value that the function yields.
MANAGERS = {"contextmanager", "asynccontextmanager"}


@dataclass
class Class:
    """A class of the package, as its source describes it."""

    name: str
    module: str
    bases: list[str]
    fields: Scope = field(default_factory=dict)
    methods: dict[str, Function] = field(default_factory=dict)


@dataclass
class Writers:
    """Findings: fields as "Class.field", with the modules that assign them."""

    modules: dict[str, set[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)  # "module:line target"

    def several(self) -> dict[str, list[str]]:
        """Return the fields that more than one module assigns."""
        return {
            name: sorted(found) for name, found in sorted(self.modules.items()) if len(found) > 1
        }


def find_writers(sources: Mapping[str, str], room: str) -> Writers:
    """Return the writers of the fields of all classes in modules below `room`.

    Args:
        sources: module name → source, of the whole package.
        room: prefix of the modules with these classes, such as "elastic_mbs.engine".
    """
    return _Package(sources, room).writers()


class _Package:
    """All modules of a package, with the meaning of their names."""

    def __init__(self, sources: Mapping[str, str], room: str) -> None:
        self.trees = {module: ast.parse(text) for module, text in sources.items()}
        self.room = room
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, Function] = {}
        for module, tree in self.trees.items():
            self._collect(module, tree)
        for each in self.classes.values():
            self._learn_fields(each)

    def _collect(self, module: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                each = Class(node.name, module, [_last(base) or "" for base in node.bases])
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        each.fields[line.target.id] = line.annotation
                    elif isinstance(line, Function):
                        each.methods[line.name] = line
                self.classes[node.name] = each
        self.functions |= {line.name: line for line in tree.body if isinstance(line, Function)}

    def _learn_fields(self, owner: Class) -> None:
        for method in owner.methods.values():
            scope = self.scope_of(method, owner.name, {})
            for node in ast.walk(method):
                for target, type_ in self._bindings(node, scope):
                    if isinstance(target, ast.Attribute) and _last(target.value) == "self":
                        known = owner.fields.get(target.attr)
                        owner.fields[target.attr] = known if known is not None else type_

    # -------------------------------------------------------------------------- types

    def scope_of(self, function: Function, owner: str | None, outer: Scope) -> Scope:
        """Return the types of a function's parameters and variables, on top of those around it."""
        scope = dict(outer)
        arguments = function.args
        plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for each in plain:
            scope[each.arg] = each.annotation
        if owner is not None and plain and plain[0].arg == "self":
            scope["self"] = ast.Name(owner)
        for _ in range(2):  # in a loop a variable can be made from one below it
            for node in _own_nodes(function):
                for target, type_ in self._bindings(node, scope):
                    if isinstance(target, ast.Name) and scope.get(target.id) is None:
                        scope[target.id] = type_
        return scope

    def _bindings(self, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.expr, Type]]:
        """Yield the targets that a statement or expression binds, with their types."""
        if isinstance(node, ast.AnnAssign):
            yield node.target, node.annotation
        elif isinstance(node, ast.NamedExpr):
            yield node.target, self.type_of(node.value, scope)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from self._unpacked(target, node.value, scope)
        elif isinstance(node, ast.For | ast.comprehension):
            element = _element(self.type_of(node.iter, scope))
            if isinstance(node.iter, ast.Call) and _last(node.iter.func) in {"zip", "enumerate"}:
                element = self._in_step(node.iter, scope)
            yield from _shared_out(node.target, element)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield node.optional_vars, self._entered(node.context_expr, scope)

    def _in_step(self, node: ast.Call, scope: Scope) -> Type:
        """Return the type of the items of `zip(…)` or `enumerate(…)`."""
        items = [_element(self.type_of(each, scope)) or ast.Constant(None) for each in node.args]
        if _last(node.func) == "enumerate":
            items = [ast.Name("int"), *items[:1]]
        return ast.Subscript(ast.Name("tuple"), ast.Tuple(items))

    def _unpacked(
        self, target: ast.expr, value: ast.expr, scope: Scope
    ) -> Iterator[tuple[ast.expr, Type]]:
        pairs = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        if pairs and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]  # both are
            for one, other in zip(target.elts, value.elts, strict=True):  # type: ignore[attr-defined]
                yield from self._unpacked(one, other, scope)
        else:
            yield from _shared_out(target, self.type_of(value, scope))

    def type_of(self, node: ast.expr, scope: Scope) -> Type:
        """Return the type of an expression, as an annotation."""
        if isinstance(node, ast.Name):
            return scope.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.class_of(self.type_of(node.value, scope))
            return self._attribute(owner, node.attr)
        if isinstance(node, ast.Call):
            return self._result(node, scope)
        if isinstance(node, ast.Subscript):
            return _element(self.type_of(node.value, scope))
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Starred):
            return self.type_of(node.value, scope)
        if isinstance(node, ast.IfExp):
            return self.type_of(node.body, scope) or self.type_of(node.orelse, scope)
        if isinstance(node, ast.BoolOp):
            found = (self.type_of(value, scope) for value in node.values)
            return next((each for each in found if each is not None), None)
        return None

    def _attribute(self, owner: Class | None, name: str) -> Type:
        for each in self.line_of(owner):
            if each.fields.get(name) is not None:
                return each.fields[name]
            if name in each.methods and _is_property(each.methods[name]):
                return _with_self(each.methods[name].returns, each.name)
        return None

    def _result(self, node: ast.Call, scope: Scope) -> Type:
        if _last(node.func) == "cast" and node.args:
            return node.args[0]
        if isinstance(node.func, ast.Name):
            name = node.func.id
            if name in self.classes or name[:1].isupper():
                return ast.Name(name)
            return self.functions[name].returns if name in self.functions else None
        if isinstance(node.func, ast.Attribute):
            receiver = node.func.value
            owner = self.class_of(self.type_of(receiver, scope))
            if owner is None and isinstance(receiver, ast.Name):  # `Class.make(…)`
                owner = self.classes.get(receiver.id)
            if isinstance(receiver, ast.Call) and _last(receiver.func) == "super":
                owner = self.class_of(scope.get("self"))
            for each in self.line_of(owner):
                if node.func.attr in each.methods:
                    return _with_self(each.methods[node.func.attr].returns, each.name)
            if node.func.attr[:1].isupper():  # `module.Class(…)`
                return ast.Name(node.func.attr)
            if owner is None and node.func.attr in self.functions:
                return self.functions[node.func.attr].returns
        return None

    def _entered(self, node: ast.expr, scope: Scope) -> Type:
        found = self.type_of(node, scope)
        if isinstance(node, ast.Call):
            name = _last(node.func) or ""
            functions = [
                each.methods[name] for each in self.classes.values() if name in each.methods
            ]
            if name in self.functions:
                functions.append(self.functions[name])
            for function in functions:
                if MANAGERS & {_last(each) for each in function.decorator_list}:
                    return _element(function.returns)
        entered = self.class_of(found)
        return found if entered is None else ast.Name(entered.name)

    def class_of(self, type_: Type) -> Class | None:
        """Return the class of the package that an annotation names."""
        return next((self.classes[name] for name in _names(type_) if name in self.classes), None)

    def line_of(self, owner: Class | None) -> Iterator[Class]:
        """Yield a class, and its bases that belong to the package."""
        if owner is not None:
            yield owner
            for base in owner.bases:
                yield from self.line_of(self.classes.get(base))

    # -------------------------------------------------------------------------- assignments

    def writers(self) -> Writers:
        found = Writers()
        looked_at = {
            name
            for each in self.classes.values()
            if each.module.startswith(self.room)
            for name in each.fields
        }
        for module, tree in self.trees.items():
            asked = looked_at if self._knows_room(module) else set()
            for node, scope in self._with_scopes(tree.body, None, {}):
                for target, name in _stores(node):
                    self._note(found, module, target, name, scope, asked)
        return found

    def _knows_room(self, module: str) -> bool:
        return module.startswith(self.room) or any(
            (node.module or "").startswith(self.room)
            for node in ast.walk(self.trees[module])
            if isinstance(node, ast.ImportFrom)
        )

    def _note(
        self,
        found: Writers,
        module: str,
        target: ast.expr,
        name: str,
        scope: Scope,
        asked: set[str],
    ) -> None:
        type_ = self.type_of(target, scope)
        owner = self.class_of(type_)
        if owner is not None:
            line = [each for each in self.line_of(owner) if name in each.fields]
            if line and line[-1].module.startswith(self.room):
                found.modules.setdefault(f"{line[-1].name}.{name}", set()).add(module)
        elif name in asked and not list(_names(type_)):
            found.unknown.append(f"{module}:{target.lineno} {ast.unparse(target)}.{name}")

    def _with_scopes(
        self, body: list[ast.stmt], owner: str | None, outer: Scope
    ) -> Iterator[tuple[ast.AST, Scope]]:
        """Yield every node with the scope of its function."""
        waiting: list[ast.AST] = list(body)
        while waiting:
            node = waiting.pop()
            if isinstance(node, Function):
                yield from self._with_scopes(node.body, owner, self.scope_of(node, owner, outer))
            elif isinstance(node, ast.ClassDef):
                yield from self._with_scopes(node.body, node.name, outer)
            else:
                yield node, outer
                waiting.extend(ast.iter_child_nodes(node))


def _stores(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield (object, field) of each field that a node assigns or deletes."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.value, node.attr
    elif isinstance(node, ast.Call) and _last(node.func) in SETTERS and len(node.args) > 1:
        target, name = node.args[:2]
        if isinstance(name, ast.Constant):
            yield target, str(name.value)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield a function's nodes in their order, without those of functions inside it."""
    for statement in function.body:
        yield from _outside_functions(statement)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, Function | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)


def _last(node: ast.expr) -> str | None:
    """Return the last name of `a.b.c`, of a call of it, or of `c[…]`."""
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _parts(type_: Type) -> Iterator[ast.expr]:
    """Yield the members of a union, without None, quotes and wrappers such as Final."""
    if isinstance(type_, ast.Constant):
        if isinstance(type_.value, str):
            yield from _parts(ast.parse(type_.value, mode="eval").body)
    elif isinstance(type_, ast.BinOp):
        yield from _parts(type_.left)
        yield from _parts(type_.right)
    elif isinstance(type_, ast.Subscript) and _last(type_) in WRAPPERS | {"Union"}:
        inner = type_.slice.elts if isinstance(type_.slice, ast.Tuple) else [type_.slice]
        for each in inner[: None if _last(type_) == "Union" else 1]:
            yield from _parts(each)
    elif type_ is not None:
        yield type_


def _names(type_: Type) -> Iterator[str]:
    """Yield the classes that an annotation names, but for Any and object."""
    for part in _parts(type_):
        name = _last(part)
        if name is not None and name not in {"Any", "object"}:
            yield name


def _element(type_: Type) -> Type:
    """Return the type of the items of an annotated container, or of a mapping's values."""
    for part in _parts(type_):
        if isinstance(part, ast.Subscript):
            inner: list[Any] = (
                part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
            )
            if _last(part) in CONTAINERS:
                return inner[0]  # type: ignore[no-any-return]  # expressions
            if _last(part) in MAPPINGS and len(inner) == 2:
                return inner[1]  # type: ignore[no-any-return]
    return None


def _shared_out(target: ast.expr, type_: Type) -> Iterator[tuple[ast.expr, Type]]:
    """Yield the names of an unpacked target, each with its part of a tuple's type."""
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, type_
        return
    inner: list[Type] = [_element(type_)] * len(target.elts)
    for part in _parts(type_):
        if isinstance(part, ast.Subscript) and _last(part) == "tuple":
            found = part.slice.elts if isinstance(part.slice, ast.Tuple) else []
            if len(found) == len(target.elts):
                inner = list(found)
    for one, other in zip(target.elts, inner, strict=True):
        yield from _shared_out(one, other)


def _is_property(function: Function) -> bool:
    return bool({"property", "cached_property"} & {_last(each) for each in function.decorator_list})


def _with_self(type_: Type, owner: str) -> Type:
    """Return an annotation in which `Self` is the class."""
    return ast.Name(owner) if "Self" in _names(type_) else type_

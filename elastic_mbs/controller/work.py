"""Memory as αT + βΣL²: what a piece takes, by its elements and by the length of its samples.

Attention whose weights are kept takes memory quadratic in the length L of a sample; everything else
takes memory in proportion to the elements T. For n samples of L elements each, T is n·L and ΣL² is
T·L.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Work(NamedTuple):
    """The memory of a piece of x elements, in samples of L: in proportion to x·(α + βL)."""

    alpha: float
    beta: float

    def equivalent(self, x: float, elements: int, target: int) -> float:
        """Return how many elements in samples of `target` take what x in samples of `elements` do.

        Args:
            x: elements of a piece.
            elements: of one of its samples.
            target: elements of a sample of the other piece.
        """
        if elements == target:
            return x
        return x * (self.alpha + self.beta * elements) / (self.alpha + self.beta * target)


LINEAR = Work(1.0, 0.0)
QUADRATIC = Work(0.0, 1.0)
# The least determinant of the normal equations, of columns of length 1. Below it, what grows with
# the length cannot be told from what does not: sizes and lengths have varied too little, or only
# together.
APART = 0.001


class Measured(NamedTuple):
    """The peak in bytes of a piece of x elements, in samples of `elements` each."""

    x: int
    elements: int
    peak: int


def fitted(points: Iterable[Measured]) -> Work | None:
    """Return α and β by least squares of peak = base + αx + βxL, neither of them negative.

    Errors count relative to the peak. None where the measurements do not tell the two apart.
    """
    columns = [(1 / max(1, p), x / max(1, p), x * length / max(1, p)) for x, length, p in points]
    one, xs, squares = (sum(row[i] ** 2 for row in columns) ** 0.5 for i in range(3))
    if not one:
        return None
    unit = [(a / one, b / xs, c / squares) for a, b, c in columns]
    ab, ac, bc = (sum(row[i] * row[j] for row in unit) for i, j in ((0, 1), (0, 2), (1, 2)))
    if 1 + 2 * ab * ac * bc - ab * ab - ac * ac - bc * bc < APART:
        return None
    ya, yb, yc = (sum(row[i] for row in unit) for i in range(3))
    # Cramer's rule, without the determinant: only the ratio of the two counts.
    alpha = (yb * (1 - ac * ac) + ya * (ac * bc - ab) + yc * (ab * ac - bc)) / xs
    beta = (yc * (1 - ab * ab) + ya * (ab * bc - ac) + yb * (ab * ac - bc)) / squares
    if alpha > 0 and beta > 0:
        return Work(alpha, beta)
    return QUADRATIC if beta > 0 else LINEAR

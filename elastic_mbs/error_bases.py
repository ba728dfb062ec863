"""The bases of the errors, one for each decision of a caller. Nothing here needs torch.

`errors.py` has the tree.
"""


class ElasticMBSError(Exception):
    """The base of every error that this package raises by itself."""


class UsageError(ElasticMBSError, ValueError):
    """An argument is wrong; the message names its value and the way out."""


class MisuseError(ElasticMBSError, RuntimeError):
    """The training loop does something inside a batch that a replay cannot undo."""


class UnsupportedError(ElasticMBSError, RuntimeError):
    """A mode of torch, or a device, on which a replay cannot be made exact.

    CUDA graph capture, nn.DataParallel and some modes of DDP and FSDP2 are such modes.
    """


class RecoveryError(ElasticMBSError, RuntimeError):
    """Memory ran out and the batch could not be finished."""


# Tracebacks and pickles name the module that has all errors.
for _error in (ElasticMBSError, UsageError, MisuseError, UnsupportedError, RecoveryError):
    _error.__module__ = "elastic_mbs.errors"

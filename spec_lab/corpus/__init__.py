"""The text the pocket model is trained and evaluated on, generated here or taken from the standard library."""

from spec_lab.corpus.categories import CATEGORIES, CHECKABLE_CATEGORIES, NATURAL_CATEGORIES, generate
from spec_lab.corpus.natural import natural_text

__all__ = ["CATEGORIES", "CHECKABLE_CATEGORIES", "NATURAL_CATEGORIES", "generate", "natural_text"]

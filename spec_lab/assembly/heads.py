"""An old name, for one release: see `spec_lab.extend`."""

from spec_lab.wiring.drafting import DrafterFactory, DrafterResources, make_picker

__all__ = ["DrafterFactory", "DrafterResources", "make_picker"]

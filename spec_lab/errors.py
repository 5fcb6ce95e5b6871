"""An old name, for one release: see `spec_lab.UserError`."""

from spec_lab.core.errors import UserError

__all__ = ["UserError"]

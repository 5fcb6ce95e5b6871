"""An old module name, kept for one release. Use `spec_lab.UserError`."""

from spec_lab.core.errors import UserError

__all__ = ["UserError"]

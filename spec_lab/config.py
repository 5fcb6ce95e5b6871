"""An old name, kept for one release: its contents are in `spec_lab.menu`, and extensions import `spec_lab.extend`."""

from spec_lab.menu.choices import *  # noqa: F403
from spec_lab.menu.config import *  # noqa: F403

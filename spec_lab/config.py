"""An old module name, kept for one release. Its contents are in `spec_lab.menu`. Extensions use `spec_lab.extend`."""

from spec_lab.menu.choices import *  # noqa: F403
from spec_lab.menu.config import *  # noqa: F403

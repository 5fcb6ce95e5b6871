"""The version, in a separate module.

If Python runs in the folder that contains a clone named like the package, it takes that folder for the package. An
editable install then still finds the package's modules, but not the contents of its `__init__`.
"""

VERSION = "0.1.0"

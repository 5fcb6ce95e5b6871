"""The version, in a separate module.

If a clone is named like the package, and Python runs in the folder that contains the clone, Python takes the clone for
the package. An editable install then still finds the package's modules, but not the contents of its `__init__`.
"""

VERSION = "0.1.0"

"""The version, in a module of its own: from beside a clone, Python takes that folder for the package.

An editable install still finds the modules of the package then, but nothing of its `__init__`.
"""

VERSION = "0.1.0"

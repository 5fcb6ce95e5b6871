"""One request of a run, round by round, each token with where it came from: for terminals and for notebooks.

from IPython.display import HTML
from spec_lab.show import request_html

HTML(request_html("outputs/run-pocket-eagle3-strict-catchup-eager-5e6f7a8b", "code-3"))
"""

from spec_lab.show.html import request_html

__all__ = ["request_html"]

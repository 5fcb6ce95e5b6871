"""Shows one request of a run in terminals and notebooks, round by round, with the origin of each token.

from IPython.display import HTML
from spec_lab.show import request_html

HTML(request_html("outputs/run-pocket-eagle3-strict-catchup-eager-5e6f7a8b", "code-3"))
"""

from __future__ import annotations

import os


def request_html(run: str | os.PathLike[str], request_id: str) -> str:
    """Write a fragment that shows one request of the run in the folder `run`, for `IPython.display.HTML`.

    Raises:
        UserError: there is no such run or request, or its record is broken.
    """
    from spec_lab.record.runs import folder_of
    from spec_lab.show.html import fragment
    from spec_lab.show.rounds import load_request

    return fragment(load_request(folder_of(run), str(request_id)))

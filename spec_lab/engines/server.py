"""engine=server: any OpenAI-compatible server that already runs: vLLM, SGLang, TensorRT-LLM, llama-server.

Prompts go to `/v1/completions` as token ids, `batch_size` at a time. Drafts are counted for a whole pass, as the
differences of the counters of `/metrics`, so nothing else may use the server meanwhile. The server drafts as it was
started: drafter and K of the run are what its user says of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plan import Knobs
from .streams import Answer, Asked, counters, events, got, served

if TYPE_CHECKING:
    from spec_lab.config.run import Run

ANY = ("draft_model", "eagle3", "mtp_eagle", "dflash", "dspark", "ngram", "suffix", "p_eagle")
KNOBS = Knobs(
    engine="server",
    package="",
    install="",
    drafters={name: name for name in ANY},
    rules={name: name for name in ("strict", "one_hot", "standard", "block")},
    arrivals=True,
)
COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
BY_POSITION = "num_accepted_tokens_per_pos"
KNOWN = {"vllm": {"return_token_ids": True}, "llamacpp": {"verbose": True, "cache_prompt": False}, "sglang": {}}
"""The servers whose counters are known, by their prefix, and what has each tell token ids."""
STOPS_EARLY = "llamacpp"
"""A server whose rounds draft fewer tokens near a token limit. It is asked for K tokens more, and left at the limit."""
STARTED = ("process_start_time_seconds", "")


def refusals(run: Run) -> Iterator[str]:
    """A server must be named."""
    config: Any = run.engine
    if config.url is None:
        yield "engine=server needs the server's address; add engine.url=http://HOST:PORT"


def settings(run: Run, notes: list[str]) -> dict[str, Any]:
    """Return where the servers are."""
    config: Any = run.engine
    return {"url": config.url, "plain_url": config.plain_url, "model": config.model, "counters": config.counters}


def files(run: Run, scratch: Path) -> dict[str, Any]:
    """A server has its own."""
    return {"target": None, "head": None}


class ServerEngine:
    """A server at an address."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told, self._url = told, told["url"].rstrip("/").removesuffix("/v1")
        key = told["options"].get("api_key")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            served_models = json.loads(self._get("/v1/models"))["data"]
        except OSError as error:
            raise RuntimeError(
                f"no server answers at {self._url} ({error}); start it, or correct engine.url"
            ) from error
        self._model = told["model"] or served_models[0]["id"]
        page = self._metrics()
        self._kind = next((kind for kind in KNOWN if any(name.startswith(f"{kind}:") for name, _ in page)), None)
        if told["counters"] and told["num_draft_tokens"] and self._kind is None:
            raise RuntimeError(
                f"{self._url}/metrics has no counters of {', '.join(KNOWN)}; start the server with its metrics, or use "
                "engine.counters=false, which leaves acceptance unknown"
            )
        self.version = self._version()

    def generate(self, asked: dict[str, Any], say: Callable[[Answer], None]) -> dict[str, Any]:
        """Answer the requests of a pass, and count what the server counted meanwhile."""
        before = self._metrics()
        seconds = served(asked["requests"], self._told["batch_size"], self._answer, say)
        done: dict[str, Any] = {"seconds": seconds}
        if self._told["counters"] and self._told["num_draft_tokens"]:
            done |= counted(before, self._metrics(), str(self._kind), self._told["num_draft_tokens"])
        return done

    def _answer(self, request: Asked, now: Callable[[], float]) -> Answer:
        told, limit = self._told, request["max_new_tokens"]
        more = told["num_draft_tokens"] if self._kind == STOPS_EARLY else 0
        body = {
            "model": self._model,
            "prompt": request["prompt_ids"],
            "max_tokens": limit + more,
            "temperature": told["temperature"],
            "seed": request["seed"],
            "stream": True,
            **{name: told[name] for name in ("top_k", "top_p") if told[name] is not None},
            **({"ignore_eos": True} if request["ignore_eos"] else {}),
            **KNOWN.get(self._kind or "", {}),
            **told["options"].get("body", {}),
        }
        stream = events(self._url, "/v1/completions", body, told["timeout"], self._headers)
        return read_stream(stream, limit, now)

    def _get(self, path: str) -> str:
        return got(self._url, path, self._told["timeout"], self._headers)

    def _metrics(self) -> dict[tuple[str, str], float]:
        try:
            return counters(self._get("/metrics"))
        except RuntimeError:  # the server has no such page
            return {}

    def _version(self) -> str | None:
        try:
            version = json.loads(self._get("/version"))["version"]
        except (RuntimeError, ValueError, KeyError, TypeError):
            return self._kind
        return f"{self._kind or 'server'} {version}"


def read_stream(stream: Iterator[Any], limit: int, now: Callable[[], float]) -> Answer:
    """Read a request's stream to its end, or past its limit: its text, its token ids if the server tells them, and when
    its first and last came."""
    ids: list[int] = []
    text: list[str] = []
    times: list[float] = []
    tells, reason = True, None
    for event in stream:
        if "error" in event:
            raise RuntimeError(f"the server: {json.dumps(event['error'])[:300]}")
        for choice in event.get("choices", ()):
            found = choice.get("token_ids") or (event.get("__verbose") or {}).get("tokens") or []
            ids += found
            text.append(choice.get("text") or "")
            tells = tells and not (text[-1] and not found)
            if found or text[-1]:
                times.append(now())
            reason = choice.get("finish_reason") or reason
        if len(ids) > limit:
            reason = "length"
            break
    stream.close()  # type: ignore[attr-defined]
    if reason is None:
        raise RuntimeError("the server ended a stream without a reason; it may have restarted")
    return {
        "output_ids": ids[:limit] if tells and ids else None,
        "text": "".join(text),
        "finish_reason": "eos" if reason == "stop" else "length",
        "emitted_at": [times[0], times[-1]] if times else None,
    }


def counted(
    before: Mapping[tuple[str, str], float], after: Mapping[tuple[str, str], float], kind: str, most: int
) -> dict[str, Any]:
    """Return the drafts of a pass from the counters before and after it. SGLang has none, only its own mean.

    Raises:
        RuntimeError: the server was restarted meanwhile, has other counters, or drafts more than `most` tokens.
    """
    counted = [key for key in before if "spec_decode_num" in key[0]]
    if before.get(STARTED) != after.get(STARTED) or any(after.get(key, 0.0) < before[key] for key in counted):
        raise RuntimeError("the server was restarted in the middle of a pass, so its counters began anew")
    if kind == "sglang":
        own = after.get(("sglang:spec_accept_length", ""))
        return {"totals": None, "told": {} if own is None else {"spec_accept_length": own}}

    def grown(name: str, place: str = "") -> int:
        found = [(f"{kind}:spec_decode_{name}{end}", place) for end in ("_total", "")]
        key = next((key for key in found if key in after), None)
        if key is None:
            raise RuntimeError(f"the server's version has no counter {found[0][0]}; use engine.counters=false")
        return round(after[key] - before.get(key, 0.0))

    rounds, offered, accepted = map(grown, COUNTED)
    places = sorted(int(place) for name, place in after if place and BY_POSITION in name)
    by_position = [grown(BY_POSITION, str(place)) for place in places]
    if offered > most * rounds or any(by_position[most:]):
        raise RuntimeError(
            f"the server drafts more than drafter.num_draft_tokens={most} tokens a round; say what it was started with"
        )
    told = {"acceptance_rate": accepted / offered} if offered else {}
    totals = {"rounds": rounds, "accepted": accepted, "by_position": by_position[:most] if places else None}
    return {"totals": totals, "told": told}


ENGINE = ServerEngine
"""What the worker makes."""

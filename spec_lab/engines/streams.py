"""What workers share: passes of requests over threads, streams of server-sent events, and counters of servers."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

Asked = Mapping[str, Any]
Answer = dict[str, Any]
COUNTER = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})?\s+(\S+)")


def served(
    requests: Sequence[Asked],
    most: int,
    answer: Callable[[Asked, Callable[[], float]], Answer],
    say: Callable[[Answer], None],
) -> float:
    """Answer requests on up to `most` threads, say each answer when it is complete, and return the seconds.

    A request with `arrives_at` is begun then, or as soon as a thread is free. An answer's times are seconds from the
    start. The first error is raised once the requests that run have ended.
    """
    started = time.perf_counter()
    waiting = iter(requests)
    lock, failed = threading.Lock(), threading.Event()

    def now() -> float:
        return time.perf_counter() - started

    def work() -> None:
        while not failed.is_set():
            with lock:
                request = next(waiting, None)
            if request is None:
                return
            arrives_at = request.get("arrives_at")
            if arrives_at is not None:
                time.sleep(max(0.0, arrives_at - now()))
            admitted_at = now()
            try:
                found = answer(request, now)
            except BaseException:
                failed.set()
                raise
            arrived_at = admitted_at if arrives_at is None else arrives_at
            say({"id": request["id"], "admitted_at": admitted_at, "arrived_at": arrived_at, **found})

    with ThreadPoolExecutor(most) as pool:
        for future in [pool.submit(work) for _ in range(most)]:
            future.result()
    return now()


def events(url: str, path: str, body: Mapping[str, Any], timeout: float, headers: Mapping[str, str]) -> Iterator[Any]:
    """Post `body`, and yield the JSON of each server-sent event. Closing the iterator closes the connection."""
    connection = connected(url, timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{url}{path} answers {response.status}: {response.read(500).decode(errors='replace')}")
        for line in response:
            text = line.decode().strip()
            if text.startswith("data:") and text != "data: [DONE]":
                yield json.loads(text.removeprefix("data:"))
    finally:
        connection.close()


def got(url: str, path: str, timeout: float, headers: Mapping[str, str]) -> str:
    """Return the text of a page."""
    connection = connected(url, timeout)
    try:
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        if response.status != 200:
            raise RuntimeError(f"{url}{path} answers {response.status}: {text[:200]}")
        return text
    finally:
        connection.close()


def connected(url: str, timeout: float) -> http.client.HTTPConnection:
    """Open a connection to the host of a URL."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout)


def counters(text: str) -> dict[tuple[str, str], float]:
    """Return the values of a page in Prometheus' format, by name and position (a label), summed over other labels."""
    found: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        if (match := COUNTER.match(line)) is not None:
            name, labels, value = match.groups()
            place = re.search(r'position="(\d+)"', labels or "")
            key = name, place[1] if place else ""
            found[key] = found.get(key, 0.0) + float(value)
    return found


def cut(rounds: list[tuple[int, int, int]], given: int, limit: int) -> tuple[list[tuple[int, int, int]], int]:
    """Cut rounds that were run past a token limit: leave out those that begin behind it.

    Args:
        rounds: (offered, accepted, emitted) drafts and tokens of each.
        given: tokens before the first of them.

    Returns:
        The rounds that begin before the limit, as they were judged but with the tokens that fit, and the number of
        tokens.
    """
    kept = []
    for offered, accepted, emitted in rounds:
        if given >= limit:
            break
        fits = min(emitted, limit - given)
        kept.append((offered, accepted, fits))
        given += fits
    return kept, given

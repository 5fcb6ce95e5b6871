"""PTX of a kernel that may be placed early is read along every path: before it waits for the kernel in front, a program
loads nothing but what no kernel that is placed early writes, writes nothing, and does not end.

Where an address comes from is followed through all registers, whatever the order of instructions, and not through
shared memory; an address that comes from no pointer counts as a fault.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

_WAIT = "griddepcontrol.wait"
_REGISTER = re.compile(r"%[a-z]+\d+")
_PARAMETER = re.compile(r"_param_(\d+)")
_ADDRESS = re.compile(r"\[([^\]]*)\]")
_LABEL = re.compile(r"\$?\w+:")
_GLOBAL = re.compile(r"(ld|st|atom|red|cp\.async)\b.*\.global|(atom|red)\.")


@dataclass
class _Block:
    """Instructions that run one after another, and the places they may go on at."""

    instructions: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True


def faults_before_waiting(ptx: str, names: list[str], may_be_read: tuple[str, ...]) -> list[str]:
    """Return the instructions that a program may reach before it has waited, and must not.

    Args:
        names: of the kernel's parameters, in their order.
        may_be_read: those of memory that no kernel that is placed early writes.
    """
    faults = []
    for line, read in _before_waiting(ptx, names):
        if line.startswith(("ret", "exit")):
            faults.append(line)
        elif _GLOBAL.match(line) and not (line.startswith(("ld", "cp.async")) and read and read <= set(may_be_read)):
            faults.append(f"{line} {sorted(read)}")
    return faults


def loads_before_waiting(ptx: str, names: list[str], of: str) -> list[str]:
    """Return the loads of a parameter's memory that a program may reach before it has waited."""
    return [line for line, read in _before_waiting(ptx, names) if _GLOBAL.match(line) and of in read]


def _before_waiting(ptx: str, names: list[str]) -> Iterator[tuple[str, set[str]]]:
    """Give each instruction, without its predicate, that a program may reach before it has waited, with the pointers
    that an access's address comes from."""
    body = [" ".join(line.partition("//")[0].split()) for line in ptx[ptx.index("{") :].splitlines()]
    blocks = _blocks(body)
    sources = _sources([line for block in blocks.values() for line in block.instructions])
    for label in _reached_without_waiting(blocks):
        for line in takewhile(lambda line: _WAIT not in line, blocks[label].instructions):
            plain = re.sub(r"^@!?%p\d+ ", "", line)
            places = _parameters_of(plain, sources) if _GLOBAL.match(plain) else set()
            yield plain, {name for place, name in enumerate(names) if place in places and name.endswith("_ptr")}


def _blocks(body: list[str]) -> dict[str, _Block]:
    """Cut a kernel at its labels and behind its branches; the first block has no name."""
    blocks = {"": (block := _Block())}
    for line in body:
        if label := _LABEL.fullmatch(line):
            block = blocks.setdefault(label[0][:-1], _Block())
        elif line.endswith(";") and not line.startswith("."):
            block.instructions.append(line)
            branch = re.search(r"\bbra(?:\.uni)?\s+(\S+);", line)
            if branch is not None:
                block.targets.append(branch[1])
            if branch is not None or line.startswith("ret"):
                block.falls_through = line.startswith("@")
                block = blocks.setdefault(f"{len(blocks)} behind", _Block())
    return blocks


def _reached_without_waiting(blocks: dict[str, _Block]) -> list[str]:
    """Return the blocks that a path leads to on which nobody has waited."""
    order = list(blocks)
    behind = dict(pairwise(order))
    reached, left = [], [order[0]]
    while left:
        label = left.pop()
        if label in reached or label not in blocks:
            continue
        reached.append(label)
        block = blocks[label]
        if not any(_WAIT in line for line in block.instructions):
            left += block.targets
            if block.falls_through and label in behind:
                left.append(behind[label])
    return reached


def _sources(instructions: list[str]) -> dict[str, set[int]]:
    """Return the parameters from which each register is computed."""
    sources: dict[str, set[int]] = defaultdict(set)
    is_settled = False
    while not is_settled:
        is_settled = True
        for line in instructions:
            operands = re.sub(r"^@!?%p\d+ ", "", line).partition(" ")[2]
            written, _, rest = operands.partition("}" if operands.lstrip().startswith("{") else ",")
            if "[" in written:
                continue
            found = {int(place) for place in _PARAMETER.findall(rest)}
            found |= {place for name in _REGISTER.findall(rest) for place in sources[name]}
            for name in _REGISTER.findall(written):
                if not found <= sources[name]:
                    sources[name] |= found
                    is_settled = False
    return sources


def _parameters_of(line: str, sources: dict[str, set[int]]) -> set[int]:
    """Return those that an access's address is computed from; a copy to shared memory has two."""
    address = _ADDRESS.findall(line)[-1]
    return {place for name in _REGISTER.findall(address) for place in sources[name]}

"""Checks of the drafter's files, which need no drafts: tokenizer, vocabulary, dtype of the weights."""

from __future__ import annotations

from pathlib import Path

import torch

from spec_lab.checkpoints.checkpoint import FLOAT_DTYPES, read_tensors, stored_tensors
from spec_lab.checkpoints.checkpoint_files import StoredTensor
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.gguf_tokenizer import has_tokenizer, vocabulary_of
from spec_lab.checkpoints.target_tensors import without_mtp
from spec_lab.doctor.findings import Finding, Verdict, does_not_apply
from spec_lab.doctor.subject import Subject

# Rounding float32 weights to bfloat16 changes a tensor by about 0.2 % of its norm. A larger change has another cause.
MAX_CAST_ERROR = 0.01
# A head that cannot draft one in ten of the target's tokens loses acceptance, but this may be intended.
MIN_DRAFTABLE = 0.9
# A map that is off by one covers clearly fewer of the target's tokens. The difference is measured in standard errors
# (McNemar) and counts each different token once, since one frequent token could otherwise decide.
MIN_STANDARD_ERRORS = 4.0
NO_CHECKPOINT = "the drafter's weights are not a safetensors checkpoint"


def check_tokenizer(subject: Subject) -> Finding:
    """Compare the target's tokenizer with its embedding, and with the drafter's own tokenizer if there is one."""
    check, vocab_size = "tokenizer", subject.models.target.vocab_size
    ours_folder, theirs_folder = subject.config.target.folder, subject.drafter_folder
    ours = _vocabulary(ours_folder)
    if ours is None:
        return does_not_apply(check, "the target has none; the prompts are ids")
    measured = f"{len(ours)} tokens for an embedding of {vocab_size} rows"
    if outside := sum(token_id >= vocab_size for token_id in ours.values()):
        cause = f"{outside} token ids are outside the target's embedding: tokenizer.json belongs to another model"
        return Finding(check, Verdict.FAULT, measured, cause)
    theirs = None if theirs_folder == ours_folder else _vocabulary(theirs_folder)
    if theirs is None:
        return Finding(check, Verdict.OK, f"{measured}; the drafter brings none of its own")
    same = sum(theirs.get(token) == token_id for token, token_id in ours.items())
    measured += f"; {same} of them have the same id in the drafter's"
    if same == len(ours):
        return Finding(check, Verdict.OK, measured)
    cause = f"{theirs_folder} was trained with another tokenizer; use a drafter of the target's family"
    return Finding(check, Verdict.FAULT, measured, cause)


def check_vocabulary(subject: Subject) -> Finding:
    """Check whether `d2t` maps to the ids that the target writes rather than to their neighbours."""
    check, vocab_size = "vocabulary map (d2t)", subject.models.target.vocab_size
    stored = _stored(subject)
    if stored is None:
        return does_not_apply(check, NO_CHECKPOINT)
    d2t = next((tensor for name, tensor in stored.items() if name.removeprefix("model.") == "d2t"), None)
    if d2t is None or len(d2t.shape) != 1:
        return does_not_apply(check, f"the drafter drafts all {vocab_size} ids of the target")
    offsets = read_tensors({"d2t": d2t}, torch.float32, "cpu")["d2t"].long()
    target_ids = torch.arange(len(offsets)) + offsets
    written = torch.tensor([token for record in subject.plain for token in record.output_ids])
    share = float(torch.isin(written, target_ids).double().mean())
    is_monotone = bool((target_ids.diff() > 0).all())
    measured = (
        f"{len(target_ids)} ids, {int(target_ids.min())}..{int(target_ids.max())} of {vocab_size}, "
        f"{'ascending' if is_monotone else 'not ascending'}; {share:.1%} of the target's own tokens can be drafted"
    )
    for shift in (-1, 1):
        if _shift_gain(written.unique(), target_ids, shift) >= MIN_STANDARD_ERRORS:
            shifted = float(torch.isin(written, target_ids + shift).double().mean())
            cause = f"d2t is shifted by {-shift:+d}: {shifted:.1%} could be drafted with every id {shift:+d}"
            return Finding(check, Verdict.FAULT, measured, cause)
    is_fine = is_monotone and share >= MIN_DRAFTABLE
    return Finding(check, Verdict.OK if is_fine else Verdict.SUSPICIOUS, measured)


def check_dtype(subject: Subject) -> Finding:
    """Measure how much the cast to the run's dtype changes the weights. The loader has refused NaN and overflow."""
    check, dtype = "dtype of the weights", subject.models.dtype
    stored = _stored(subject)
    if stored is None:
        return does_not_apply(check, NO_CHECKPOINT)
    trunk = without_mtp(stored)  # the target's own layers, if the folder has them too
    own = {name: tensor for name, tensor in stored.items() if name not in trunk} or stored
    floating = {name: tensor for name, tensor in own.items() if tensor.dtype in FLOAT_DTYPES}
    worst_error, worst_name = 0.0, ""
    for name, at in floating.items():  # one in memory at a time, since a draft model may be large
        tensor = read_tensors({name: at}, torch.float32, "cpu")[name]
        cast = tensor.to(dtype).float()
        error = float((cast - tensor).norm() / tensor.norm().clamp(min=1e-30))
        if error > worst_error:
            worst_error, worst_name = error, name
    kinds = ", ".join(sorted({tensor.dtype for tensor in floating.values()}))
    measured = f"stored {kinds}, run in {str(dtype).removeprefix('torch.')}; largest change {worst_error:.1e}"
    if worst_error > MAX_CAST_ERROR:
        cause = f"{worst_name} does not survive the run's dtype; use dtype=bfloat16 or float32"
        return Finding(check, Verdict.FAULT, measured, cause)
    return Finding(check, Verdict.OK, measured)


def _vocabulary(path: Path) -> dict[str, int] | None:
    """Return the id of each token; None without a tokenizer."""
    from tokenizers import Tokenizer

    if is_gguf(path):
        return vocabulary_of(path) if has_tokenizer(path) else None
    file = path / "tokenizer.json"
    return Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else None


def _shift_gain(words: torch.Tensor, target_ids: torch.Tensor, shift: int) -> float:
    """Return how many more of the different tokens `words` the shifted map covers, in standard errors."""
    as_it_is, shifted = torch.isin(words, target_ids), torch.isin(words, target_ids + shift)
    gained, lost = int((shifted & ~as_it_is).sum()), int((as_it_is & ~shifted).sum())
    return (gained - lost) / max(gained + lost, 1) ** 0.5


def _stored(subject: Subject) -> dict[str, StoredTensor] | None:
    """Return the tensors of the drafter's folder; None if it does not store them as safetensors.

    The drafter has been loaded by now, so a folder of safetensors is readable.
    """
    try:
        return stored_tensors(subject.drafter_folder)
    except OSError:  # a GGUF file, or none in this format
        return None

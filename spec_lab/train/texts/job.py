"""Writes a folder of texts: prompts, answers, the user's next turns, and answers to those. Finished files are kept."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spec_lab.core.errors import UserError
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FinishReason, Request
from spec_lab.train.texts.chat import ChatForm
from spec_lab.train.texts.folder import ANSWERS, FOLLOW_UPS, MOST_FILE_BYTES, PROMPTS, Answered, TextsFolder
from spec_lab.train.texts.header import HEADER, TextsHeader, digest_of_file
from spec_lab.train.texts.own_prompts import BegunTurn, begin_follow_ups, begin_prompts, end_turns
from spec_lab.train.texts.plan import Rate
from spec_lab.train.texts.prompts import GENERATED, OTHERS, Conversation, Seen, in_words, read_prompts, refuse_missing
from spec_lab.train.texts.settings import TextsConfig, settings_of_texts
from spec_lab.train.texts.write import TextProgress, Writer
from spec_lab.workloads.conversations import before_end

BATCHES_OF_A_PROBE = 4
FEWEST_ASKED, LEAST_SHARE = 1000, 0.05
RAISE_IT = "raise max_prompt_tokens (writing.max_prompt_tokens, where the same command trains)"
MORE = 1.05
"""The factor by which more prompts are begun than should be needed, since more may be dropped than expected."""


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """A planned file of answers: its prompts and its temperature."""

    name: str
    first: int
    last: int
    temperature: float


def write_texts(writer: Writer, config: TextsConfig, root: Path) -> TextsFolder:
    """Write the missing files of a folder of texts, and return it.

    If the texts of a new folder are refused before the first file of answers, everything is deleted.

    Raises:
        UserError: the folder holds other texts, a file of prompts or the target's chat template cannot be used, or no
            prompt is left.
    """
    form = ChatForm(writer.tokenizer)
    form.refuse_unless_usable(begins_turns=not config.prompts)
    header = TextsHeader(writer.written_by(), settings_of_texts(config), digests_of_sources(config))
    root.mkdir(parents=True, exist_ok=True)
    return _write_new(writer, config, root, header, form)


def _write_new(writer: Writer, config: TextsConfig, root: Path, header: TextsHeader, form: ChatForm) -> TextsFolder:
    """Write the texts. If they are refused, delete what was begun here, unless there are answers already. So other
    settings can be used next."""
    is_new = not (root / HEADER).exists()
    folder = TextsFolder(root, header)
    try:
        return TextsJob(writer, config, folder, form).run()
    except UserError:
        if is_new and not folder.names(ANSWERS):
            folder.drop()
        raise


def digests_of_sources(config: TextsConfig) -> dict[str, str]:
    """Return for each source of prompts a digest of a file's content; empty for a generator. A source's key is its
    last part, or all of it if an earlier source has the same last part.

    Raises:
        UserError: there is no such file.
    """
    refuse_missing(config.prompts)
    digests: dict[str, str] = {}
    for source in config.prompts:
        name = Path(source).name
        digest = "" if source.startswith(GENERATED) else digest_of_file(Path(source))
        digests[source if name in digests else name] = digest
    return digests


def probe(writer: Writer, config: TextsConfig) -> Rate:
    """Write a few texts without keeping them, and return the speed and their lengths.

    On a CPU at most 16 tokens of an answer are written. If `max_new_tokens` is larger, answers count as that long.
    """
    on_gpu = writer.models.device.type == "cuda"
    number = BATCHES_OF_A_PROBE * config.batch_size if on_gpu else min(config.batch_size, 4)
    most = config.max_new_tokens if on_gpu else min(config.max_new_tokens, 16)
    form = ChatForm(writer.tokenizer)
    begun = begin_prompts(form, 0, number, config.seed, config.max_prompt_tokens)
    requests = [turn.request if on_gpu else replace(turn.request, max_new_tokens=most) for turn in begun]
    with TextProgress("a probe", 2 * number) as progress:
        records = writer.write(requests, config.prompt_temperatures[0], progress)  # this run also compiles and captures
        prompts, _ = end_turns(form, begun, records, writer.eos_token_ids, Seen())
        ids = writer.tokenizer.encode_batch([form.text(prompt.turns) for prompt in prompts])
        began_at, num_before = progress.seconds, progress.num_tokens
        asked = [
            Request(f"probe-{place}", "", tuple(prompt), most)
            for place, prompt in enumerate(ids)
            if len(prompt) <= config.max_prompt_tokens
        ]
        writer.write(asked, config.prompt_temperatures[0], progress)
        num_tokens, seconds = progress.num_tokens - num_before, progress.seconds - began_at
    answer = num_tokens / max(1, len(asked)) if most == config.max_new_tokens else config.max_new_tokens
    return Rate(num_tokens / seconds, sum(map(len, ids)) / max(1, len(ids)), answer)


@dataclass(frozen=True, slots=True)
class TextsJob:
    """The stages of a folder of texts."""

    writer: Writer
    config: TextsConfig
    folder: TextsFolder
    form: ChatForm

    @property
    def num_second_turns(self) -> int:
        return round(self.config.num_texts * self.config.second_turns)

    def run(self) -> TextsFolder:
        """Run the missing stages; each needs the files of those before it."""
        num_first = self.config.num_texts - self.num_second_turns
        if self.config.prompts:
            self._read_prompts(num_first)
        else:
            self._write_prompts(num_first)
        asked = self.folder.read_prompts(PROMPTS)[:num_first]
        # Files of prompts and of answers each have one temperature. Without shuffling, all prompts of one temperature
        # would get answers of one temperature.
        random.Random(self.config.seed).shuffle(asked)
        if not asked:
            counts = self.folder.header.counts(PROMPTS)
            longer = f", or {RAISE_IT}" if counts["too_long"] else ""
            raise UserError(f"prompts: none are left ({in_words(counts)}); {OTHERS}{longer}")
        self._answer("a", asked, asked)
        if self.num_second_turns:
            self._write_follow_ups(asked)
            self._answer("b", self.folder.read_prompts(FOLLOW_UPS)[: self.num_second_turns], asked)
        return self.folder

    def _read_prompts(self, number: int) -> None:
        if self.folder.names(PROMPTS):
            return
        found, counts = read_prompts(self.config.prompts, self.config.seed, self.config.test_prompts)
        random.Random(self.config.seed).shuffle(found)
        seen = Seen()
        kept = [conversation for conversation in found if seen.is_new(conversation)]
        counts["duplicate"] += len(found) - len(kept)
        fitting = self._fitting(kept)
        counts["too_long"] += len(kept) - len(fitting)
        counts["kept"] = len(fitting[:number])
        self.folder.add_prompts(f"{PROMPTS}-00000.jsonl", fitting[:number], counts)

    def _fitting(self, conversations: list[Conversation]) -> list[Conversation]:
        """Return the conversations whose prompt is not too long."""
        ids = self._ids(conversations)
        pairs = zip(conversations, ids, strict=True)
        return [conversation for conversation, prompt in pairs if len(prompt) <= self.config.max_prompt_tokens]

    def _write_prompts(self, number: int) -> None:
        """Let the target write prompts until there are enough."""
        seen = Seen()
        for conversation in self.folder.read_prompts(PROMPTS):
            seen.is_new(conversation)

        def begin(num_asked: int, missing: int) -> list[BegunTurn]:
            config = self.config
            return begin_prompts(self.form, num_asked, missing, config.seed, config.max_prompt_tokens)

        self._write_turns(PROMPTS, number, begin, seen)

    def _write_follow_ups(self, asked: Sequence[Conversation]) -> None:
        """Write the user's next turn in some of the conversations: that of the files, or without files the target's."""
        places = list(range(len(asked)))
        random.Random(self.config.seed + 1).shuffle(places)
        answers = self._answers_by_conversation("a")
        answered = [place for place in places if place in answers]

        def begin(num_asked: int, missing: int) -> list[BegunTurn]:
            chosen = answered[num_asked : num_asked + missing]
            said = [replace(asked[place], turns=(*asked[place].turns, answers[place])) for place in chosen]
            return begin_follow_ups(self.form, said, self.config.max_prompt_tokens)

        if self.config.prompts:
            self._take_later_turns(asked, answered, answers)
        else:
            self._write_turns(FOLLOW_UPS, self.num_second_turns, begin, Seen(), most_asked=len(answered))

    def _take_later_turns(
        self, asked: Sequence[Conversation], answered: Sequence[int], answers: dict[int, str]
    ) -> None:
        """Add the second turns from the files, after the target's own answers."""
        if self.folder.names(FOLLOW_UPS):
            return
        going_on = [place for place in answered if asked[place].later_turns]
        said = [
            replace(
                asked[place], turns=(*asked[place].turns, answers[place], asked[place].later_turns[0]), later_turns=()
            )
            for place in going_on
        ]
        fitting = self._fitting(said)[: self.num_second_turns]
        counts = Counter(asked=len(said), kept=len(fitting))
        self.folder.add_prompts(f"{FOLLOW_UPS}-00000.jsonl", fitting, counts)

    def _write_turns(
        self,
        kind: str,
        number: int,
        begin: Callable[[int, int], list[BegunTurn]],
        seen: Seen,
        most_asked: int | None = None,
    ) -> None:
        """Write files of user's turns until `number` of them are kept, or `most_asked` have been begun."""
        counts = self.folder.header.counts(kind)
        with TextProgress(kind, number, counts["kept"]) as progress:
            while counts["kept"] < number and (most_asked is None or counts["asked"] < most_asked):
                share = (counts["kept"] + 1) / (counts["asked"] + 1)
                missing = round((number - counts["kept"]) / max(share, 0.1) * MORE) + 1
                missing = min(missing, self.config.texts_per_file)
                missing = missing if most_asked is None else min(missing, most_asked - counts["asked"])
                begun = begin(counts["asked"], missing)
                index, temperatures = len(self.folder.names(kind)), self.config.prompt_temperatures
                temperature = temperatures[index % len(temperatures)]
                records = self.writer.write([turn.request for turn in begun], temperature, progress)
                kept, new = end_turns(self.form, begun, records, self.writer.eos_token_ids, seen)
                fitting = self._fitting(kept)  # re-tokenising a text may give other tokens
                new["asked"], new["no_room"] = missing, missing - len(begun) + len(kept) - len(fitting)
                new["kept"] = len(fitting)
                self.folder.add_prompts(f"{kind}-{index:05d}.jsonl", fitting, new)
                counts.update(new)
                if counts["asked"] > FEWEST_ASKED and counts["kept"] < LEAST_SHARE * counts["asked"]:
                    raise UserError(
                        f"prompts=[]: of {counts['asked']} prompts that the target wrote {counts['kept']} can be used; "
                        f"give others with prompts=[FILE.jsonl], or {RAISE_IT}"
                    )

    def _answers_by_conversation(self, turn: str) -> dict[int, str]:
        """Return the answers as texts, including truncated ones, after which a conversation also continues."""
        found: dict[int, str] = {}
        eos = self.writer.eos_token_ids
        for name in self.folder.names(f"{ANSWERS}-{turn}"):
            for text in self.folder.read_answers(name):
                written = before_end(text.tokens[text.prompt_length :], eos)
                found[text.conversation] = self.writer.tokenizer.decode(written)
        return found

    def _answer(self, turn: str, prompts: Sequence[Conversation], asked: Sequence[Conversation]) -> None:
        """Write the missing files of answers to `prompts`, each of which continues one of the conversations `asked`."""
        numbers = {conversation.prompt_id: place for place, conversation in enumerate(asked)}
        files = self.answer_files(turn, len(prompts))
        missing = [file for file in files if file.name not in self.folder.header.files]
        num_done = len(prompts) - sum(file.last - file.first for file in missing)
        with TextProgress(f"answers {turn}", len(prompts), num_done) as progress:
            for file in missing:
                chosen = prompts[file.first : file.last]
                requests = [
                    Request(f"{turn}-{conversation.prompt_id}", "", tuple(ids), self.config.max_new_tokens)
                    for conversation, ids in zip(chosen, self._ids(chosen), strict=True)
                ]
                of = {f"{turn}-{each.prompt_id}": numbers[each.prompt_id] for each in chosen}
                records = self.writer.write(requests, file.temperature, progress)
                texts, counts = self._texts(records, of)
                self.folder.add_answers(file.name, texts, counts)

    def answer_files(self, turn: str, number: int) -> list[AnswerFile]:
        """Plan the files for `number` answers: of about equal size, ordered by temperature, and equally many for each
        temperature unless there are too few answers."""
        wide = self.folder.id_type().itemsize
        most = max(1, min(self.config.texts_per_file, MOST_FILE_BYTES // (wide * self.config.longest)))
        temperatures = self.config.temperatures
        num_files = -(-number // most)
        num_files = min(number, -(-num_files // len(temperatures)) * len(temperatures))
        bounds = [number * index // max(1, num_files) for index in range(num_files + 1)]
        order = sorted(temperatures[index % len(temperatures)] for index in range(num_files))
        return [
            AnswerFile(f"{ANSWERS}-{turn}{index:05d}.safetensors", bounds[index], bounds[index + 1], order[index])
            for index in range(num_files)
        ]

    def _ids(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        texts = [self.form.text(conversation.turns, conversation.system) for conversation in conversations]
        return self.writer.tokenizer.encode_batch(texts)

    def _texts(self, records: Sequence[RequestRecord], of: dict[str, int]) -> tuple[list[Answered], Counter[str]]:
        """Return the texts that are not empty, and their counts."""
        texts: list[Answered] = []
        counts: Counter[str] = Counter(kept=0, cut=0, empty=0, tokens=0)
        for record in records:
            if not before_end(record.output_ids, self.writer.eos_token_ids):
                counts["empty"] += 1
                continue
            counts["kept"] += 1
            counts["cut"] += record.finish_reason is FinishReason.LENGTH
            counts["tokens"] += len(record.output_ids)
            tokens = [*record.prompt_ids, *record.output_ids]
            texts.append(Answered(tokens, len(record.prompt_ids), of[record.request_id]))
        return texts, counts

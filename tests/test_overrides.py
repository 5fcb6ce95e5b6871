"""Typos are refused with the nearest name, whatever stands before them; what exists goes through unchanged."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser

from spec_lab.core.errors import UserError
from spec_lab.program import flags
from spec_lab.program.override_text import as_override
from spec_lab.program.overrides import check_arguments, value_of
from spec_lab.program.own_options import typed_folders
from spec_lab.program.unsafe import UNPICKLES

REFUSED = [
    ("batchsize=3", "did you mean batch_size?"),
    ("+batchsize=3", "did you mean batch_size?"),
    ("++batchsize=3", "did you mean batch_size?"),
    ("~batchsize", "did you mean batch_size?"),
    ("+batch_size=3", "write batch_size=3"),
    ("++drafter.max_ngram=3", "write drafter.max_ngram=3"),
    ("~batch_size", "set batch_size="),
    ("~drafter", "choose another option with drafter="),
    ("~drafter=eagle3", "choose another option with drafter="),
    ("+experiment=drafters_quick", "write experiment=drafters_quick"),
    ("dafter=eagle3", "did you mean drafter?"),
    ("drafter=eagel3", "did you mean eagle3?"),
    ("drafter=eagle3,ngran", "did you mean ngram?"),
    ("experiment=drafter_quick", "did you mean drafters_quick?"),
    ("debug=smok", "did you mean smoke?"),
    ("drafter=nothing_like_it", "it takes one of eagle3, "),
    ("drafter=glob(nope*)", "selects no job; drafter takes "),
    ("drafter=null", "drafter takes one of"),
    ("drafter=[none,ngram]", "drafter takes one of"),
    ("drafter@target=eagle3", "write drafter=... without target"),
    ("drafter.num_draft_token=3", "did you mean drafter.num_draft_tokens?"),
    ("num_draft_tokens=3", "did you mean drafter.num_draft_tokens?"),
    ("limit=3", "did you mean workload.limit?"),
    ("drafter.name=ngram", "write drafter=..."),
    ("cache=3", "cache.page_size"),
    ("cache.pagesize=3", "did you mean cache.page_size?"),
    ("temp=1", "there is no key temp; see --help"),
    ("drafter.xyzzy=1", "there is no key drafter.xyzzy; see --help"),
    ("drafter.num_steps=3", "did you mean drafter.num_draft_tokens?"),
    ("drafter.model=DIR", "did you mean drafter.path?"),
    ("model=DIR", "did you mean target.path?"),
    ("method=eagle3", "did you mean drafter?"),
    ("num_speculative_tokens=3", "did you mean drafter.num_draft_tokens?"),
    ("ngram_size=3", "did you mean drafter.max_ngram?"),
    ("drafter.draft_length=4", "did you mean drafter.num_draft_tokens?"),  # and not drafter.draft_sampling
    ("prompt_lookup_num_tokens=4", "did you mean drafter.num_draft_tokens?"),
    ("acceptance.top_k=3", "did you mean acceptance.topk?"),  # and not sampling.top_k
    ("drafter.taps=[1]", "there is no key drafter.taps; see --help"),  # and not workload.tasks
    ("prompt_lookup_max=3", "did you mean drafter.max_ngram?"),
    ("outputs/run", "not of the form KEY=VALUE; see --help"),
    ("drafter=eagle3;ngram", "with -m several values stand with commas alone: drafter=eagle3,ngram"),
    ("drafter=(eagle3,ngram)", "(extraneous input '('); with -m several values"),
    ("seed=(0,1)", "with -m several values stand with commas alone: seed=0,1"),
    ("speculative_config.method=eagle3", "did you mean drafter?"),  # and not acceptance.method
    ("drafer.path=DIR", "did you mean drafter.path?"),  # and not target.path
    ("draft_tensor_parallel_size=1", "see --help"),  # and not target.tensor_parallel
    ("cache.block_size=32", "did you mean cache.page_size?"),
    ("graph.mode=round", "graph=OPTION chooses an option, and --help graph lists the keys"),  # and not logger.mode
    ("num_gpus=2", "did you mean target.tensor_parallel?"),  # and not cache.num_pages
    ("num_bars=2", "see --help"),  # and not tree.num_rows
    ("seed=range(1,2,0)", "must not be zero; write range(FIRST,END,STEP)"),
    ("my.yaml", "a file is not read here"),
    ("sampling.max_new_tokens=1", "did you mean max_new_tokens?"),
    ("xyzzy=1", "there is no key xyzzy; see --help"),
    ("catchup", "did you mean prune=catchup?"),
    ("drafer", "did you mean drafter=VALUE?"),
    ("batch_size", "did you mean batch_size=VALUE?"),
    ("references=null", "references has no value null, it takes plain"),
    ("a.b:c=3", "not of the form KEY=VALUE"),
    ("batch_size=two", "batch_size takes a whole number, not 'two'"),
    ("batch_size=1,two", "batch_size takes a whole number, not 'two'"),
    ("batch_size=3.5", "batch_size takes a whole number, not 3.5"),
    ("batch_size=[1,2]", "not [1, 2]; several values, each a run of its own, are written 1,2"),
    ("batch_size=null", "batch_size takes a whole number, not null"),
    ("num_threads=many", "num_threads takes a whole number or null, not 'many'"),
    ("sampling.temperature=warm", "sampling.temperature takes a number, not 'warm'"),
    ("dry_run=perhaps", "dry_run takes true or false, not 'perhaps'"),
    ("references=plain", "references takes a list like [a,b], not 'plain'"),
    ("name=[a]", "name takes a text"),
    ("seed=range(0,1000000000)", "has more than 10000 jobs"),
    ("hydra.sweeper.max_batch_size=0", "must be at least 1"),
    ("output_dir=a,b", "output_dir is read once for all jobs; give it one value"),
    ("fresh=true,false", "fresh is read once for all jobs"),
    ("batch_size=1,", "write values without blanks"),
    ("3", "A blank ends a value"),
    ("/tmp/a-run", "not of the form KEY=VALUE; see --help"),
    ("@words.txt", "KEY=VALUE; a file of words is not read: type $(cat words.txt)"),
    ("drafter:eagle3", "did you mean drafter=eagle3?"),
    ("batch_size:4", "did you mean batch_size=4?"),
    ("drafter=eagle3 prune=catchup", "give each as a word of its own: drafter=eagle3 prune=catchup"),
    ("leave_out=[seed=1 batch_size=2,seed=3]", "type \"leave_out=['seed=1 batch_size=2','seed=3']\""),
    ("leave_out=drafter=eagle3 prune=catchup", "type \"leave_out=['drafter=eagle3 prune=catchup']\""),
    ("workload.categories=[größe", "type \"workload.categories=['größe']\""),
    ("workload.categories=[code,", 'quote the whole list: "workload.categories=[code, ...]"'),
    ("target.path=~/head", f"target.path='{Path.home()}/head'"),
    ("drafter.max_ngram,drafter.min_ngram=4,2", "each word sets one key"),
    ("--dryrun", "did you mean --dry-run?"),
    ("--mulitrun", "did you mean --multirun?"),
]

PASSED = [
    "batch_size=3",
    "batch_size=1,8",
    "batch_size=range(1,4)",
    "drafter=eagle3,ngram",
    "drafter=glob(*)",
    "drafter.max_ngram=3",
    "workload.limit=null",
    "name='a,b'",
    "name=run_${drafter.name}",
    "references=[]",
    "hydra.mode=MULTIRUN",
    "hydra/launcher=basic",
    "+hydra.anything=3",
    "-m drafter=eagle3,ngram",
    "--cfg job",
    "--info searchpath",
    "--config-dir mine drafter=mine",
    "hydra.searchpath=[file:///mine] drafter=mine",
]


@pytest.mark.parametrize(("argument", "message"), REFUSED)
def test_mistakes_are_refused_in_one_line(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        check_arguments([argument])
    assert str(refused.value).startswith(argument.partition("=")[0])
    assert message in str(refused.value)


@pytest.mark.parametrize("folder", ["nowhere", "", "file"])
def test_a_folder_of_options_that_is_none_is_refused(folder: str, empty_folder: Path) -> None:
    Path("file").touch()
    with pytest.raises(UserError, match=r"there is no such folder; name one"):
        typed_folders(["--config-dir", folder, "batch_size=3"])


def test_an_empty_word_is_shown() -> None:
    with pytest.raises(UserError, match=r"^'': not of the form KEY=VALUE"):
        check_arguments([""])


@pytest.mark.parametrize("line", PASSED)
def test_what_exists_is_left_as_it_is(line: str) -> None:
    assert check_arguments(line.split()) == line.split()


def test_jobs_of_several_keys_are_multiplied() -> None:
    with pytest.raises(ValueError, match=r"^seed=range\(0,200\) batch_size=range\(1,200\) has more than 10000 jobs"):
        check_arguments(["seed=range(0,200)", "batch_size=range(1,200)"])


def test_typo_after_a_flag_with_a_value_is_seen() -> None:
    with pytest.raises(ValueError, match="did you mean batch_size"):
        check_arguments(["--cfg", "job", "batchsize=3"])
    with pytest.raises(ValueError, match="did you mean batch_size"):
        check_arguments(["--info", "batchsize=3"])


def test_flags_come_first_with_their_values() -> None:
    """Hydra's parser refuses overrides on both sides of a flag."""
    arguments = ["batch_size=1,8", "-m", "seed=1", "--info", "repeats=2", "--cfg=job", "drafter=ngram", "-i", "plugins"]
    flags_first = ["-m", "--info", "all", "--cfg", "job", "-i", "plugins"]
    assert check_arguments(arguments) == [*flags_first, "batch_size=1,8", "seed=1", "repeats=2", "drafter=ngram"]


def test_dry_run_flag_becomes_an_override() -> None:
    assert check_arguments(["drafter=ngram", "--dry-run"]) == ["drafter=ngram", "dry_run=true"]


def test_flags_are_hydras_and_dry_run() -> None:
    known = {*flags.FLAGS, *flags.FLAGS_WITH_VALUE, *flags.FLAGS_WITH_OPTIONAL_VALUE}
    actions = get_args_parser()._actions
    hydras = {flag for action in actions for flag in action.option_strings} - {UNPICKLES}
    assert known - {flags.DRY_RUN_FLAG} == hydras
    takes_one = {flag for action in actions if action.nargs is None for flag in action.option_strings}
    assert takes_one - {UNPICKLES} == set(flags.FLAGS_WITH_VALUE)
    [info] = [action for action in actions if "--info" in action.option_strings]
    assert set(info.choices or ()) == set(flags.INFO_TOPICS)


@pytest.mark.parametrize(
    "path", ["/a/b", "/a,b (1)/c=d.gguf", "it's", "back\\slash", "ends\\", "\\'", "[x]", "{y}", "null", "1", " "]
)
def test_any_path_is_read_as_it_was_given(path: str) -> None:
    assert value_of(as_override("target.path", path)) == path


@pytest.mark.parametrize(
    "path", ["/a (1)/b.gguf", "lr=3", "/\u00fcml\u00e4ut", "it's (2)", "50%!(", "/$x (1)", "a b=c", "[x](y)"]
)
def test_the_remedy_for_a_text_that_cannot_be_read_is_read(path: str) -> None:
    with pytest.raises(UserError) as refused:
        check_arguments([f"output_dir={path}"])
    [typed] = shlex.split(str(refused.value).partition(", type ")[2])
    assert check_arguments([typed]) == [typed] and value_of(typed) == path

"""The parts of the Slurm plugin that need no Slurm: options, the line of plugstack.conf, cgroups' names, texts."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.settings import APPLIED, MAX, Kind, Setting
from ggroupfs.text import values
from ggroupfs.text.names import slice_directory
from ggroupfs.text.origins import origin
from ggroupfs.text.properties import BY_NAME

SOURCES = Path(__file__).parents[2] / "packaging" / "slurm"
OPTIONS = [one for one in APPLIED if one.job_option is not None]
CAPACITY = 16 << 30
PLACE = 4096

INTERFACE = """
#include <stdlib.h>
#include <string.h>
#include "config.h"
#include "tree.h"
#include "words.h"

const char *option(int at) { return at < ROWS ? rows[at].name : NULL; }

const char *text_of(int at, const char *text, unsigned long capacity, char *out)
{
	struct value value = { 0 };
	const char *wrong = value_parse(&rows[at], text, &value);

	if (!wrong)
		value_text(&rows[at], value_on(value, capacity), out);
	return wrong;
}

static struct config config;
static char *words[100];

const char *configure(int count, const char **given)
{
	for (int at = 0; at < count; at++)
		words[at] = strdup(given[at]);
	config_read(&config, count, words);
	return config.fault;
}

const char *tree_named(void) { return config.tree; }
unsigned long shards(void) { return config.shards; }
int choices(void) { return config.runs_without << 1 | config.records; }

int default_of(const char *partition, int at, unsigned long capacity, char *out)
{
	struct value value;
	int found = config_default(&config, partition, &rows[at], &value);

	if (found)
		value_text(&rows[at], value_on(value, capacity), out);
	return found;
}

int refused(const char *partition, int at, const char *text, unsigned long capacity, char *reason)
{
	struct value value = { 0 };

	if (value_parse(&rows[at], text, &value))
		abort();
	return config_refuses(&config, partition, &rows[at], value, capacity, reason);
}

const char *cgroups(const char *lines, unsigned int job, char *where, char *step, char *node)
{
	struct cgroups found = { .job = "" };
	const char *wrong = cgroups_find(lines, job, &found);

	strcpy(where, found.job);
	strcpy(step, found.step);
	strcpy(node, found.node);
	return wrong;
}

int slice_of(const char *cgroup, char *place)
{
	struct tree tree = { .mount = "" };

	return tree_slice(&tree, cgroup, place);
}
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Those parts, built as a library."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "interface.c").write_text(INTERFACE)
    parts = [SOURCES / f"{name}.c" for name in ("values", "config", "tree", "words")]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run(["cc", *flags, "-o", folder / "plugin.so", folder / "interface.c", *parts], check=True)
    library = ctypes.CDLL(str(folder / "plugin.so"))
    for name in ("option", "text_of", "configure", "tree_named", "cgroups"):
        getattr(library, name).restype = ctypes.c_char_p
    library.shards.restype = library.gres_count.restype = ctypes.c_ulong
    return library


def row(option: str) -> int:
    return [one.job_option for one in OPTIONS].index(option)


def text_of(plugin: ctypes.CDLL, at: int, text: str, capacity: int = CAPACITY) -> str:
    """What the plugin would write to the control file. ValueError, with the reason, where it refuses the text."""
    out = ctypes.create_string_buffer(PLACE)
    wrong = plugin.text_of(at, text.encode(), ctypes.c_ulong(capacity), out)
    if wrong is not None:
        raise ValueError(wrong.decode())
    return out.value.decode()


def configure(plugin: ctypes.CDLL, *words: str) -> str:
    """The plugin's complaint about these words of plugstack.conf, or an empty string."""
    return str(
        plugin.configure(len(words), (ctypes.c_char_p * len(words))(*(word.encode() for word in words))).decode()
    )


def refused(plugin: ctypes.CDLL, partition: str | None, option: str, text: str, capacity: int = 0) -> str | None:
    reason = ctypes.create_string_buffer(PLACE)
    named = None if partition is None else partition.encode()
    no = plugin.refused(named, row(option), text.encode(), ctypes.c_ulong(capacity), reason)
    return reason.value.decode() if no else None


def default_of(plugin: ctypes.CDLL, partition: str, option: str) -> str | None:
    out = ctypes.create_string_buffer(PLACE)
    found = plugin.default_of(partition.encode(), row(option), ctypes.c_ulong(CAPACITY), out)
    return out.value.decode() if found else None


def test_the_options_are_the_rows(plugin: ctypes.CDLL) -> None:
    assert [plugin.option(at) for at in range(len(OPTIONS) + 1)] == [
        *(one.job_option.encode() for one in OPTIONS if one.job_option is not None),
        None,
    ]


SIZES = ["0", "1", "8G", "1.5G", "2GB", "0.001K", "3P", "50%", "12.5%", "33.33%", "0%", "100%", "100.00%", "infinity"]
NO_SIZES = ["", "lots", "-1", "8X", "8 G", "G", "1.G", ".5G", "101%", "100.01%", "1.234%", "%", "0x10", "1e3", "20P%"]
NO_SIZES += ["9" * 31, "99999999999999999999", "16384P", "8Gi", "8GG", "1.2.3", "+1", " 1"]
QUOTAS = ["30%", "30% ", "30% 1s", "12.5% 50", "0.5% 200ms", "1%", "250%", "50% 10ms 500us", "50% 0.5sec", "50% 1 sec"]
NO_QUOTAS = ["0%", "0.99%", "1% 10ms", "50% 9ms", "50% 1001ms", "50% 2s", "50% x", "50% 1m", "50%1s"]
NO_QUOTAS += [
    " 50%",
    "50",
    "50% 1s x",
    "50% -1s",
    "1.001%",
    "99999999999999999999999999%",
    "50% 99999999999999999999s",
    "50% 0",
    "50%  0.009s",
]
NUMBERS = ["", "-1", "x", "1.5", "1 ", "0x1", "99999999999999999999", "\u0661"]


@pytest.mark.parametrize("one", OPTIONS, ids=lambda one: one.job_option)
def test_a_value_is_what_a_unit_file_takes(plugin: ctypes.CDLL, one: Setting) -> None:
    """The plugin accepts a text exactly if a unit file does, with the same result; a refusal comes with a reason."""
    at = OPTIONS.index(one)
    ends = [str(one.least - 1), str(one.least), str(one.most), str(one.most + 1)]
    for text in SIZES + NO_SIZES + QUOTAS + NO_QUOTAS + NUMBERS + ([] if one.kind is Kind.SIZE else ends):
        assert outcome(plugin, at, text) == expected(one, text), text


@given(st.from_regex(r"\A[0-9]{1,20}(\.[0-9]{1,3})?[KMGTP]?B?\Z") | st.from_regex(r"\A[0-9]{1,3}(\.[0-9]{1,3})?%\Z"))
def test_any_size_is_what_a_unit_file_takes(plugin: ctypes.CDLL, text: str) -> None:
    assert outcome(plugin, row("gpu-mem"), text) == expected(OPTIONS[row("gpu-mem")], text)


@given(st.text(alphabet=st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=40))
def test_any_text_is_taken_by_both_or_by_neither(plugin: ctypes.CDLL, text: str) -> None:
    for one in OPTIONS:
        assert outcome(plugin, OPTIONS.index(one), text) == expected(one, text)


def outcome(plugin: ctypes.CDLL, at: int, text: str) -> str | None:
    try:
        return text_of(plugin, at, text)
    except ValueError:
        return None


def expected(one: Setting, text: str) -> str | None:
    """What a unit file makes of the text, or None. Blanks are allowed in a quota only: in other values a unit
    file may have them, but on a command line they are a mistake. `max` is allowed, as in the control file."""
    assert one.unit_key is not None
    if not text or (one.kind is not Kind.QUOTA and any(character.isspace() for character in text)):
        return None
    if text == "max" and one.kind in (Kind.SIZE, Kind.QUOTA):
        return values.show_default(one) if one.kind is Kind.QUOTA else "max"
    try:
        found = BY_NAME[one.unit_key].text(text, CAPACITY)
    except ValueError:
        return None
    return "max" if one.kind is Kind.SIZE and found != "max" and int(found) >= MAX else found


def test_max_is_no_limit(plugin: ctypes.CDLL) -> None:
    assert text_of(plugin, row("gpu-mem"), "max") == "max"


def test_the_reason_names_the_range(plugin: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match="not a number from 1 to 10000"):
        text_of(plugin, row("gpu-weight"), "0")


def test_without_words_the_line_means(plugin: ctypes.CDLL) -> None:
    assert configure(plugin) == ""
    assert (plugin.tree_named(), plugin.shards(), plugin.choices()) == (b"/run/ggroup", 0, 0b01)
    assert default_of(plugin, "main", "gpu-mem") is None
    assert refused(plugin, "main", "gpu-weight", "10000", CAPACITY) is None


def test_the_words_of_the_line(plugin: ctypes.CDLL) -> None:
    assert configure(plugin, "tree=/mnt/g", "library=/l.so", "without=run", "record=no", "shards=16") == ""
    assert (plugin.tree_named(), plugin.shards(), plugin.choices()) == (b"/mnt/g", 16, 0b10)


def test_a_partition_has_its_own_defaults(plugin: ctypes.CDLL) -> None:
    assert configure(plugin, "small:gpu-mem=25%", "gpu-mem=8G", "gpu-weight=50", "small:gpu-weight=10") == ""
    assert default_of(plugin, "small", "gpu-mem") == str(CAPACITY // 4)
    assert default_of(plugin, "main", "gpu-mem") == str(8 << 30)
    assert (default_of(plugin, "small", "gpu-weight"), default_of(plugin, "main", "gpu-weight")) == ("10", "50")
    assert default_of(plugin, "main", "gpu-priority") is None


def test_bounds_hold_for_what_is_asked(plugin: ctypes.CDLL) -> None:
    assert configure(plugin, "gpu-weight<=400", "gpu-priority>=8", "small:gpu-mem<=25%") == ""
    assert refused(plugin, None, "gpu-weight", "400") is None
    assert refused(plugin, None, "gpu-weight", "401") == "--gpu-weight: this cluster allows gpu-weight<=400"
    assert refused(plugin, None, "gpu-priority", "7") == "--gpu-priority: this cluster allows gpu-priority>=8"
    # The partition and the GPU are known only on the node.
    assert refused(plugin, None, "gpu-mem", "5G") is None
    assert refused(plugin, "main", "gpu-mem", "5G", CAPACITY) is None
    assert refused(plugin, "small", "gpu-mem", "4G", CAPACITY) is None
    assert refused(plugin, "small", "gpu-mem", "5G", CAPACITY) == "--gpu-mem: this cluster allows small:gpu-mem<=25%"
    assert refused(plugin, "small", "gpu-mem", "max", CAPACITY) is not None


def test_quotas_are_compared_by_what_there_is_of_each_period(plugin: ctypes.CDLL) -> None:
    assert configure(plugin, "gpu-quota<=50%", "small:gpu-quota>=10%") == ""
    assert refused(plugin, None, "gpu-quota", "50% 1s") is None
    assert refused(plugin, None, "gpu-quota", "50.01% 10ms") == "--gpu-quota: this cluster allows gpu-quota<=50%"
    assert refused(plugin, None, "gpu-quota", "infinity") is not None
    assert refused(plugin, "small", "gpu-quota", "9% 1s") is not None
    assert refused(plugin, "main", "gpu-quota", "9% 1s") is None


def test_a_default_may_be_a_quota(plugin: ctypes.CDLL) -> None:
    assert configure(plugin, "gpu-quota=50%", "small:gpu-quota=infinity") == ""
    assert default_of(plugin, "main", "gpu-quota") == "50000 100000"
    assert default_of(plugin, "small", "gpu-quota") == "max 100000"


def test_sizes_are_compared_where_they_are_submitted_if_they_can_be(plugin: ctypes.CDLL) -> None:
    assert configure(plugin, "gpu-mem<=8G", "gpu-mem-low<=10%") == ""
    assert refused(plugin, None, "gpu-mem", "9G") is not None
    assert refused(plugin, None, "gpu-mem", "90%") is None
    assert refused(plugin, None, "gpu-mem-low", "11%") is not None
    assert refused(plugin, None, "gpu-mem-low", "1T") is None


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("gpu-mem=lots", "not a size"),
        ("gpu-speed=1", "no such option"),
        ("gpu-weight", "=, <= or >= is missing"),
        ("gpu-weight<400", "=, <= or >= is missing"),
        (":gpu-weight=1", "not the name of a partition"),
        (f"{'p' * 64}:gpu-weight=1", "not the name of a partition"),
        ("gpu-quota=1", "not a percentage"),
        ("without=maybe", "not one of its words"),
        ("record=yes", "not one of its words"),
        ("shards=0", "not a number of shards"),
        ("shards=9999999", "not a number of shards"),
        ("tree=run/ggroup", "not a path from the root"),
        ("", "no such option"),
    ],
)
def test_what_cannot_be_understood_is_said(plugin: ctypes.CDLL, word: str, reason: str) -> None:
    assert configure(plugin, "record=no", word, "also=wrong").startswith(f"plugstack.conf: {word}: {reason}")


def test_there_is_room_for_some_rules(plugin: ctypes.CDLL) -> None:
    assert configure(plugin, *["gpu-weight<=400"] * 64) == ""
    assert "more of them than there is room for" in configure(plugin, *["gpu-weight<=400"] * 65)


SCOPE = "/system.slice/n1_slurmstepd.scope"


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (f"{SCOPE}/job_7/step_batch/slurm", (f"{SCOPE}/job_7", f"{SCOPE}/job_7/step_batch", "n1")),
        (f"{SCOPE}/job_7/step_0/user/task_special", (f"{SCOPE}/job_7", f"{SCOPE}/job_7/step_0", "n1")),
        (f"{SCOPE}/job_7", (f"{SCOPE}/job_7", f"{SCOPE}/job_7", "n1")),
        (
            "/system.slice/slurmstepd.scope/job_7/step_0/slurm",
            ("/system.slice/slurmstepd.scope/job_7", "/system.slice/slurmstepd.scope/job_7/step_0", ""),
        ),
        (f"/job_70{SCOPE}/job_7/step_1", (f"/job_70{SCOPE}/job_7", f"/job_70{SCOPE}/job_7/step_1", "n1")),
    ],
)
def test_the_cgroups_of_a_step(plugin: ctypes.CDLL, path: str, found: Sequence[str]) -> None:
    buffers = [ctypes.create_string_buffer(PLACE) for _ in range(3)]
    assert plugin.cgroups(f"1:name=systemd:/x\n0::{path}\n".encode(), 7, *buffers) is None
    assert tuple(buffer.value.decode() for buffer in buffers) == found
    if path.startswith("/system.slice"):
        assert origin(found[0])["job"] == "7", "the tree knows a job by the same path"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("0::/system.slice/slurmd.service\n", "jobs have no cgroups"),
        (f"0::{SCOPE}/job_70/step_0\n", "jobs have no cgroups"),
        ("4:memory:/slurm/uid_0/job_7/step_0\n", "no cgroup2"),
        ("", "no cgroup2"),
    ],
)
def test_a_step_without_them(plugin: ctypes.CDLL, lines: str, reason: str) -> None:
    buffers = [ctypes.create_string_buffer(PLACE) for _ in range(3)]
    assert plugin.cgroups(lines.encode(), 7, *buffers).decode().startswith(reason)


@given(st.lists(st.sampled_from(["a", "12", "_12", "__", "_", "job_3", "0x", "1_"]), max_size=6))
def test_a_slice_is_called_as_the_tree_calls_it(plugin: ctypes.CDLL, parts: list[str]) -> None:
    place = ctypes.create_string_buffer(PLACE)
    path = "".join(f"/{part}" for part in parts)
    assert plugin.slice_of(path.encode(), place)
    assert place.value.decode() == f"/{slice_directory(path)}"


def test_a_path_that_has_no_room_is_none(plugin: ctypes.CDLL) -> None:
    assert not plugin.slice_of(b"/x" * PLACE, ctypes.create_string_buffer(PLACE))


@pytest.mark.parametrize(
    ("listed", "gpus", "shards"),
    [
        ("", 0, 0),
        ("(null)", 0, 0),
        ("gpu:1,shard:16", 1, 16),
        ("gpu:a100:2(S:0-1),shard:32(S:0-1)", 2, 32),
        ("gpu:a100:2(IDX:0,3),gpu:h100:1(IDX:4)", 3, 0),
        ("shard:a100:3(3/16,0/16)", 0, 3),
        ("shard:3(3/16),gpu:0", 0, 3),
        ("gres/gpu:2", 2, 0),
        ("gpus:4,mps:100", 0, 0),
    ],
)
def test_how_many_of_a_resource(plugin: ctypes.CDLL, listed: str, gpus: int, shards: int) -> None:
    assert (plugin.gres_count(listed.encode(), b"gpu"), plugin.gres_count(listed.encode(), b"shard")) == (gpus, shards)


def comment_with(plugin: ctypes.CDLL, old: str | None, node: str, figures: str) -> str:
    comment = ctypes.create_string_buffer(PLACE)
    encoded = None if old is None else old.encode()
    plugin.comment_with(encoded, node.encode(), figures.encode(), comment, ctypes.c_ulong(PLACE))
    return comment.value.decode()


def test_a_comment_has_an_entry_for_each_node_and_keeps_the_rest(plugin: ctypes.CDLL) -> None:
    comment = comment_with(plugin, None, "n1", "gpu_seconds=1.000")
    assert comment == "ggroup/n1: gpu_seconds=1.000"
    comment = comment_with(plugin, f"by hand; {comment}; more", "n10", "gpu_seconds=2.000")
    assert comment == "by hand; ggroup/n1: gpu_seconds=1.000; more; ggroup/n10: gpu_seconds=2.000"
    comment = comment_with(plugin, comment, "n1", "gpu_seconds=3.000")
    assert comment == "by hand; more; ggroup/n10: gpu_seconds=2.000; ggroup/n1: gpu_seconds=3.000"
    for node, figures, has in (("n1", "gpu_seconds=3.000", 1), ("n1", "gpu_seconds=3.00", 0), ("n2", "x", 0)):
        assert plugin.comment_has(comment.encode(), node.encode(), figures.encode()) == has


@pytest.mark.parametrize(
    ("preloaded", "has"),
    [("", 0), ("/l.so", 1), ("/l.so:x", 1), ("x /l.so", 1), ("x:/l.so y", 1), ("/l.so.1", 0), ("x/l.so", 0), (":", 0)],
)
def test_what_is_preloaded_already_is_not_named_again(plugin: ctypes.CDLL, preloaded: str, has: int) -> None:
    assert plugin.preload_has(preloaded.encode(), b"/l.so") & 1 == has

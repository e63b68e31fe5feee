"""The registry: records are checked, picks are explained, and no plugin spoils another."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer import discovery
from deepinfer.discovery import BROKEN, Plugin, collect_records
from deepinfer.errors import ConfigError, NameClash, PartUnavailable, RegistryError, UnknownPart
from deepinfer.hooks import SUPPORTED_APIS, Record, hookimpl
from deepinfer.kinds import KINDS, OP_KINDS
from deepinfer.registry import Registry, default_registry


def part(**keywords):
    return keywords


@pytest.fixture
def registry():
    return Registry(builtin=False, plugins=())


def add(registry, name, kind="op.attention", factory=part, **fields):
    registry.register(Record(kind, name, factory, **fields))


# --- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fields", "told"),
    [
        (("Op.Attention", "x", part), {}, "kind"),
        (("op..attention", "x", part), {}, "kind"),
        (("op.attention", "a:b", part), {}, "name"),
        (("op.attention", "", part), {}, "name"),
        (("op.attention", "x", "no_colon"), {}, "factory"),
        (("op.attention", "x", ".relative:name"), {}, "factory"),
        (("op.attention", "x", 3), {}, "factory"),
        (("op.attention", "x", part), {"devices": ("cpu", 1)}, "devices"),
        (("op.attention", "x", part), {"dtypes": ("",)}, "dtypes"),
        (("op.attention", "x", part), {"priority": 1.5}, "priority"),
        (("op.attention", "x", part), {"priority": True}, "priority"),
        (("op.attention", "x", part), {"probe": "no colon"}, "probe"),
        (("op.attention", "x", part), {"accepts": 7}, "accepts"),
        (("op.attention", "x", part), {"bundle": 7}, "bundle"),
        (("op.attention", "x", part), {"api": "1"}, "api"),
        (("op.attention", "x", part), {"origin": None}, "origin"),
    ],
)
def test_a_malformed_record_is_refused_with_the_field_named(arguments, fields, told):
    with pytest.raises(ConfigError, match=f"^{told} of a record"):
        Record(*arguments, **fields)


def test_a_record_is_frozen_and_a_single_device_needs_no_tuple():
    record = Record("op.attention", "x", part, devices="cuda", dtypes=["float16"])
    assert (record.devices, record.dtypes) == (("cuda",), ("float16",))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        record.priority = 3


def test_a_record_describes_itself_as_json():
    record = Record("op.attention", "x", "some.module:attr", devices="cpu", origin="dist 1.2")
    assert json.loads(json.dumps(record.config()))["factory"] == "some.module:attr"
    assert Record("op.attention", "x", part).config()["factory"].endswith(":part")


@pytest.mark.parametrize("error", [RuntimeError("driver lost"), SystemExit(3), ImportError("libx")])
@pytest.mark.parametrize("role", ["probe", "accepts"])
def test_a_question_that_raises_is_a_reason_not_an_error(role, error):
    def raising(**_need):
        raise error

    reason = Record("op.attention", "x", part, **{role: raising}).why_not({})
    assert role in reason
    assert type(error).__name__ in reason


def test_a_question_may_be_a_string_and_a_missing_target_is_a_reason():
    record = Record("op.attention", "x", part, probe="deepinfer.no_such_module:probe")
    assert "ModuleNotFoundError" in record.why_not({})


def test_accepts_is_asked_with_the_whole_need_and_only_after_the_rest():
    asked = []
    record = Record("op.attention", "x", part, devices="cuda", accepts=lambda **need: asked.append(need))
    assert "not on cpu" in record.why_not({"device": "cpu"})
    assert asked == []
    assert record.why_not({"device": "cuda:1", "head_dim": 64}) is None
    assert asked == [{"device": "cuda:1", "head_dim": 64}]


def test_dtype_is_compared_by_name_whatever_it_is_given_as():
    class TorchLike:
        def __str__(self):
            return "torch.float32"

    record = Record("op.attention", "x", part, dtypes="float32")
    assert record.why_not({"dtype": TorchLike()}) is None
    assert "not in float16" in record.why_not({"dtype": "float16"})


# --- picking -------------------------------------------------------------------------------------


def test_factory_gets_the_keywords_and_every_call_makes_a_fresh_part(registry):
    add(registry, "x", kind="scheduler.policy", factory=part)
    first, second = (registry.resolve("scheduler.policy", window_s=2.0) for _ in range(2))
    assert first == {"window_s": 2.0}
    assert first is not second


def test_keywords_are_the_need_unless_one_is_given(registry):
    add(registry, "gpu", devices="cuda", priority=9, factory=lambda **_: "gpu")
    add(registry, "any", factory=lambda **_: "any")
    assert registry.resolve("op.attention", device="cpu") == "any"
    assert registry.resolve("op.attention", need={"device": "cuda"}, device="cpu") == "gpu"


def test_a_factory_string_is_imported_only_when_chosen(registry):
    module = types.ModuleType("deepinfer_test_lazy_part")
    module.make = lambda: "made"
    add(registry, "x", kind="weights", factory="deepinfer_test_lazy_part:make")
    assert registry.select("weights").name == "x"
    with pytest.raises(PartUnavailable, match=r"weights 'x' of local cannot be imported.*ModuleNotFoundError"):
        registry.resolve("weights")
    sys.modules[module.__name__] = module
    try:
        assert registry.resolve("weights") == "made"
    finally:
        del sys.modules[module.__name__]


def test_an_error_inside_a_factory_is_its_own(registry):
    def failing():
        raise ZeroDivisionError("inside")

    add(registry, "x", kind="weights", factory=failing)
    with pytest.raises(ZeroDivisionError, match="inside"):
        registry.resolve("weights")


def test_unknown_kind_and_name_list_what_is_known(registry):
    add(registry, "mine")
    with pytest.raises(UnknownPart, match=r"'op.nothing' is registered; known kinds: op.attention"):
        registry.select("op.nothing")
    with pytest.raises(UnknownPart, match=r"no op.attention is called 'yours'; known: mine"):
        registry.select("op.attention", name="yours")


def test_when_nothing_can_be_used_every_reason_is_told(registry):
    add(registry, "a", devices="cuda")
    add(registry, "b", probe=lambda: "no licence")
    with pytest.raises(PartUnavailable) as caught:
        registry.select("op.attention", need={"device": "cpu"})
    assert "not on cpu" in str(caught.value)
    assert "no licence" in str(caught.value)
    with pytest.raises(PartUnavailable, match="no licence"):
        registry.select("op.attention", name="b")


def test_a_plugin_may_bring_a_kind_of_its_own(registry):
    add(registry, "x", kind="weather.forecast", factory=lambda days: days * "sun")
    assert registry.kinds() == ("weather.forecast",)
    assert registry.resolve("weather.forecast", days=2) == "sunsun"


@pytest.mark.parametrize("api", [0, 2, 99])
def test_an_api_this_release_does_not_speak_makes_a_part_unavailable(registry, api):
    assert api not in SUPPORTED_APIS
    add(registry, "new", api=api, priority=100)
    add(registry, "old")
    assert registry.select("op.attention").name == "old"
    with pytest.raises(PartUnavailable, match=f"record api {api}, this release speaks 1"):
        registry.select("op.attention", name="new")


def test_registering_the_same_part_again_replaces_it(registry):
    add(registry, "x", kind="weights", factory=lambda: 1)
    add(registry, "x", kind="weights", factory=lambda: 2)
    assert registry.resolve("weights") == 2
    assert len(registry.records("weights")) == 1


def test_preference_comes_before_priority_where_it_can_be_used(registry):
    add(registry, "slow", devices="cpu")
    add(registry, "fast", priority=100)
    registry.prefer("op.attention", "slow")
    assert registry.select("op.attention", need={"device": "cpu"}).name == "slow"
    assert registry.select("op.attention", need={"device": "cuda"}).name == "fast"


def test_the_latest_preference_comes_first(registry):
    for name in "abc":
        add(registry, name)
    registry.prefer("op.attention", "c")
    registry.prefer("op.attention", "b")
    assert [record.name for record in registry.records("op.attention")] == ["b", "c", "a"]
    registry.prefer("op.attention", "c")
    assert [record.name for record in registry.records("op.attention")] == ["c", "b", "a"]


def test_preferring_what_is_not_registered_is_told_when_it_matters(registry):
    add(registry, "x")
    registry.prefer("op.attention", "trition")
    with pytest.raises(UnknownPart, match=r"'trition' is preferred but not registered; known: x"):
        registry.select("op.attention")


def test_two_registries_share_nothing():
    one, other = (Registry(builtin=False, plugins=()) for _ in range(2))
    add(one, "x")
    assert other.records() == ()
    assert one.records("op.attention")[0].origin == "local"


# --- clashes -------------------------------------------------------------------------------------


@pytest.fixture
def clashing(registry):
    add(registry, "x", origin="deepinfer-one 1.0", factory=lambda **_: "one")
    add(registry, "x", origin="deepinfer-two 2.5", factory=lambda **_: "two")
    add(registry, "y", origin="deepinfer-two 2.5", priority=-1, factory=lambda **_: "y")
    return registry


@pytest.mark.parametrize("name", ["x", None])
def test_a_clash_names_both_distributions_with_their_versions(clashing, name):
    with pytest.raises(NameClash) as caught:
        clashing.resolve("op.attention", name=name)
    assert "deepinfer-one 1.0 and deepinfer-two 2.5" in str(caught.value)
    assert "registry.prefer('op.attention', 'deepinfer-one:x')" in str(caught.value)


def test_what_does_not_clash_can_still_be_asked_for_by_name(clashing):
    assert clashing.resolve("op.attention", name="y") == "y"
    assert clashing.resolve("op.attention", name="deepinfer-two:x") == "two"


@pytest.mark.parametrize(("dist", "made"), [("deepinfer-one", "one"), ("deepinfer-two", "two")])
def test_a_preference_with_its_distribution_settles_a_clash(clashing, dist, made):
    clashing.prefer("op.attention", f"{dist}:x")
    assert clashing.resolve("op.attention") == made
    assert clashing.resolve("op.attention", name="x") == made


def test_a_preference_without_its_distribution_does_not(clashing):
    clashing.prefer("op.attention", "x")
    with pytest.raises(NameClash):
        clashing.resolve("op.attention")


def test_a_clash_elsewhere_does_not_matter_and_is_explained(clashing):
    add(clashing, "z", kind="op.rope", factory=lambda **_: "z")
    assert clashing.resolve("op.rope") == "z"
    explanation = clashing.explain("op.attention")
    assert explanation.picked is None
    assert "deepinfer-one 1.0 and deepinfer-two 2.5" in str(explanation)


# --- explaining ----------------------------------------------------------------------------------


def test_an_explanation_gives_a_reason_for_everything_not_picked(registry):
    add(registry, "best", priority=5)
    add(registry, "behind", priority=4)
    add(registry, "gpu", devices="cuda", priority=9)
    add(registry, "tie", priority=5)
    explanation = registry.explain("op.attention", {"device": "cpu"})
    assert explanation.picked.name == "best"
    reasons = {rejected.record.name: rejected.reason for rejected in explanation.rejected}
    assert set(reasons) == {"behind", "gpu", "tie"}
    assert "priority 5, this one 4" in reasons["behind"]
    assert "not on cpu" in reasons["gpu"]
    assert "first by name" in reasons["tie"]
    text = str(explanation)
    assert all(reason in text for reason in reasons.values())
    assert json.loads(json.dumps(explanation.config()))["picked"]["name"] == "best"
    registry.prefer("op.attention", "behind")
    assert "behind is preferred" in str(registry.explain("op.attention", {"device": "cpu"}))


records = st.builds(
    dict,
    name=st.sampled_from("abcd"),
    origin=st.sampled_from(["one 1", "two 2"]),
    priority=st.integers(-2, 2),
    devices=st.sampled_from([(), ("cpu",), ("cuda",)]),
    api=st.sampled_from([1, 1, 1, 2]),
)


@given(st.lists(records, max_size=8), st.lists(st.sampled_from(["a", "b", "one:a", "two:b"]), max_size=2))
def test_select_and_explain_agree_and_match_a_plain_reading_of_the_rule(fields, preferences):
    registry = Registry(builtin=False, plugins=())
    for each in fields:
        add(registry, **each)
    for name in preferences:
        registry.prefer("op.attention", name)
    need = {"device": "cpu"}
    try:
        explanation = registry.explain("op.attention", need)
    except UnknownPart:
        with pytest.raises(UnknownPart):
            registry.select("op.attention", need=need)
        return
    if explanation.picked is None:
        with pytest.raises(RegistryError):
            registry.select("op.attention", need=need)
        return
    picked = registry.select("op.attention", need=need)
    assert picked == explanation.picked
    usable = [r for r in registry.records() if r.api == 1 and r.devices in ((), ("cpu",))]
    for name in reversed(preferences):
        wanted = [r for r in usable if name in (r.name, f"{r.dist}:{r.name}")]
        if wanted:
            assert picked in wanted
            return
    assert picked.priority >= max(r.priority for r in usable if not _passed_over(r, preferences))


def _passed_over(record, preferences):
    settled = [name for name in preferences if ":" in name and name.partition(":")[2] == record.name]
    return bool(settled) and f"{record.dist}:{record.name}" not in settled


# --- plugins, without packaging (real distributions: test_plugin_distributions.py) -----------------


def plugin(name, hook):
    class Namespace:
        deepinfer_records = staticmethod(hook)

    return Plugin(name, f"deepinfer-{name} 1.0", lambda: Namespace)


@hookimpl
def good_hook():
    yield Record("op.rope", "good", part, origin="deepinfer 99")


@hookimpl
def raising_hook():
    yield Record("op.rope", "half", part)
    raise RuntimeError("in the hook")


@hookimpl
def foreign_hook():
    return [{"kind": "op.rope"}]


@hookimpl
def twice_hook():
    return [Record("op.rope", "same", part)] * 2


@hookimpl
def none_hook():
    return None


def not_marked():
    return []


@hookimpl
def wrong_signature(no_such_argument):
    return []


def test_origin_is_the_distribution_whatever_the_plugin_says():
    (record,) = collect_records([plugin("good", good_hook)])
    assert record.origin == "deepinfer-good 1.0"


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        (raising_hook, "RuntimeError: in the hook"),
        (foreign_hook, "expected deepinfer.hooks.Record"),
        (twice_hook, "yielded op.rope 'same' twice"),
        (not_marked, "no deepinfer_records"),
        (wrong_signature, "no_such_argument"),
    ],
)
def test_a_broken_plugin_gives_one_unavailable_record_and_spoils_nothing(hook, told):
    found = collect_records([plugin("bad", hook), plugin("good", good_hook)])
    assert [(record.kind, record.name) for record in found] == [(BROKEN, "bad"), ("op.rope", "good")]
    reason = found[0].why_not({})
    assert told in reason
    assert "Traceback" in reason
    with pytest.raises(PartUnavailable):
        found[0].factory()


def test_a_plugin_that_cannot_be_imported_is_broken_too():
    def load():
        raise SystemExit("no licence")

    (record,) = collect_records([Plugin("bad", "deepinfer-bad 1.0", load)])
    assert "SystemExit: no licence" in record.why_not({})


def test_a_plugin_may_bring_nothing():
    assert collect_records([plugin("none", none_hook)]) == []


def test_a_broken_plugin_raises_only_when_asked_for_by_name(monkeypatch):
    found = [plugin("bad", raising_hook), plugin("good", good_hook)]
    monkeypatch.setattr("deepinfer.registry.installed_plugins", lambda _allow: (found, []))
    registry = Registry(builtin=False)
    assert registry.select("op.rope").name == "good"
    for name in ("bad", "deepinfer-bad"):
        with pytest.raises(PartUnavailable, match="RuntimeError: in the hook"):
            registry.resolve("op.rope", name=name)
    with pytest.raises(UnknownPart, match="failed to load: bad"):
        registry.resolve("op.rope", name="other")


def test_collect_asks_each_plugin_once(monkeypatch):
    asked = []

    @hookimpl
    def counting_hook():
        asked.append(1)
        return []

    monkeypatch.setattr("deepinfer.registry.installed_plugins", lambda _allow: ([plugin("c", counting_hook)], []))
    registry = Registry()
    assert asked == []
    registry.collect()
    registry.collect()
    registry.resolve("accelerator", name="cpu")
    registry.explain("op.rope")
    assert asked == [1]


def test_a_hook_may_look_into_the_registry_that_asks_it(monkeypatch):
    registry = Registry()

    @hookimpl
    def looking_hook():
        assert registry.records("accelerator") == ()
        yield Record("op.rope", "looking", part)

    monkeypatch.setattr("deepinfer.registry.installed_plugins", lambda _allow: ([plugin("look", looking_hook)], []))
    assert registry.select("op.rope", name="looking").dist == "deepinfer-look"


def entry(name, dist, loaded):
    def load():
        loaded.append(name)
        return types.ModuleType(name)

    return types.SimpleNamespace(name=name, dist=types.SimpleNamespace(name=dist, version="1.0"), load=load)


def test_what_is_not_on_the_allow_list_is_never_imported(monkeypatch):
    loaded = []
    entries = [entry("a", "deepinfer-a", loaded), entry("b", "deepinfer-b", loaded)]
    monkeypatch.setattr(discovery, "entry_points", lambda group: entries if group == "deepinfer" else [])
    for allow, expected in [(("b",), ["b"]), (("deepinfer-a",), ["a"]), ((), []), (None, ["a", "b"])]:
        loaded.clear()
        Registry(plugins=allow, builtin=False).collect()
        assert loaded == expected


def test_a_listed_plugin_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setattr(discovery, "entry_points", lambda group: [])
    registry = Registry(plugins=("xpu",))
    (record,) = registry.records(BROKEN)
    assert "'xpu' is on the allow list but not installed" in record.why_not({})
    with pytest.raises(PartUnavailable, match="not installed"):
        registry.resolve("op.rope", name="xpu")


def test_the_allow_list_is_read_when_the_default_registry_is_made():
    code = (
        "import os, deepinfer, deepinfer.registry as r\n"
        "os.environ['DEEPINFER_PLUGINS'] = 'late'\n"
        "registry = r.default_registry()\n"
        "assert registry is r.default_registry()\n"
        "os.environ['DEEPINFER_PLUGINS'] = 'later'\n"
        "print([record.name for record in registry.records('plugin')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['late']"


# --- what this library brings ----------------------------------------------------------------------


def test_builtin_parts_come_through_the_hook_and_name_this_release():
    import deepinfer

    registry = Registry(plugins=())
    assert {record.origin for record in registry.records()} == {f"deepinfer {deepinfer.__version__}"}
    assert set(registry.kinds()) == set(KINDS)
    assert {record.name for record in registry.records("op.attention")} == {"reference", "eager", "native", "triton"}


def test_every_op_falls_back_to_the_reference_on_a_device_nobody_knows():
    registry = Registry(plugins=())
    for kind in OP_KINDS:
        assert registry.select(kind, name="reference", need={"device": "xpu", "dtype": "bfloat16"}).priority == 0
        assert registry.select(kind, need={"device": "xpu", "dtype": "bfloat16"}).name in ("eager", "reference")


def test_listing_and_explaining_the_builtin_parts_imports_none_of_them():
    code = (
        "import sys\n"
        "from deepinfer.registry import Registry\n"
        "registry = Registry(plugins=())\n"
        "registry.records(); registry.config()\n"
        "print([m for m in ('torch', 'numpy', 'triton', 'lark', 'deepinfer.kernels', 'deepinfer.models') "
        "if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_default_registry_is_made_once():
    assert default_registry() is default_registry()

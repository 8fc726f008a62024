"""The settings of `orca up` become the processes that it starts."""

import importlib
from dataclasses import fields
from pathlib import Path

import pytest

from orca.cli.small_model import small_model_folder
from orca.cli.up.layout import with_layout
from orca.cli.up.plan import Addresses, RuntimeContext, _flag, ignored_variables, plan
from orca.cli.up.settings import UpSettings, parse_settings
from orca.cli.up.spec import ProcessSpec, Role
from orca.core.domain.errors import SettingError
from orca.core.domain.model import load_model_info
from orca.scheduler.settings import BatchingSettings
from orca.scheduler.settings import parse_settings as scheduler_settings

MODEL = load_model_info(small_model_folder())
CYCLE = ["--policy", "rra", "--encode-batch", "4", "--decode-steps", "8"]


def planned(*flags: str, gpus: tuple[str, ...] = ()) -> list[ProcessSpec]:
    """Return the plan of two stages, unless the flags say otherwise."""
    return planned_by(parse_settings(["--port", "0", "--stages", "2", *flags]), gpus=gpus)


def planned_by(settings: UpSettings, *, gpus: tuple[str, ...] = ()) -> list[ProcessSpec]:
    around = RuntimeContext(
        addresses=Addresses.find(settings),
        redis_url="unix:///r.sock",
        redis_login={"ORCA_POOL_USER": "u"},
        logs=Path("/logs"),
        generation=7,
        gpus=gpus,
    )
    return plan(settings, MODEL, around)


def flags_of(spec: ProcessSpec) -> dict[str, str]:
    words = spec.command[4:]
    return dict(zip(words[::2], words[1::2], strict=True))


def by_name(specs: list[ProcessSpec]) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in specs}


def test_each_replica_has_a_scheduler_and_all_its_stages() -> None:
    names = [spec.name for spec in planned("--replicas", "2", "--stages", "3")]
    assert names == ["gateway"] + [
        name for group in (0, 1) for name in (f"scheduler-{group}", *(f"worker-{group}.{stage}" for stage in range(3)))
    ]


def test_every_stage_is_told_how_all_layers_are_divided() -> None:
    specs = by_name(planned("--replicas", "2", "--layers", "1,5"))
    workers = [flags_of(spec) for name, spec in specs.items() if name.startswith("worker")]
    assert [flags["--layers"] for flags in workers] == ["1,5"] * 4
    assert "--layers" not in flags_of(by_name(planned())["worker-0.0"])


def test_gateways_and_schedulers_export_metrics_under_the_names_that_are_asked_for() -> None:
    specs = by_name(planned("--metric-names", "orca,vllm"))
    for name in ("gateway", "scheduler-0"):
        assert flags_of(specs[name])["--metric-names"] == "orca,vllm"
        assert flags_of(specs[name])["--name"] == MODEL.name
        assert flags_of(by_name(planned())[name])["--metric-names"] == "orca"
    with pytest.raises(SettingError, match=r"^setting --metric-names: 'sglang' is not one of orca, vllm$"):
        parse_settings(["--metric-names", "sglang"])


def test_a_scheduler_is_told_the_addresses_of_its_own_stages_in_order() -> None:
    specs = by_name(planned("--replicas", "2"))
    stages = flags_of(specs["scheduler-1"])["--stages"].split(",")
    assert stages == [flags_of(specs[f"worker-1.{stage}"])["--listen"] for stage in (0, 1)]


def test_no_two_processes_share_an_address() -> None:
    specs = planned("--replicas", "2", "--stages", "3")
    addresses = [spec.address for spec in specs]
    addresses += [flags_of(spec)["--listen"] for spec in specs if spec.role is Role.SCHEDULER]
    addresses += [str(spec.health) for spec in specs if spec.role is Role.WORKER]
    assert len(set(addresses)) == len(addresses)


def test_every_part_is_probed_at_its_configured_health_address() -> None:
    specs = by_name(planned())
    assert specs["gateway"].health == specs["gateway"].address
    assert specs["scheduler-0"].health == flags_of(specs["scheduler-0"])["--metrics-listen"]
    assert specs["worker-0.1"].health == flags_of(specs["worker-0.1"])["--health-listen"]


def test_all_parts_agree_on_model_dtype_pool_and_deployment() -> None:
    flags = [flags_of(spec) for spec in planned("--dtype", "bfloat16", "--quantization", "int8", "--replicas", "2")]
    for name in ("--model", "--dtype", "--quantization", "--pool", "--deployment", "--slots-max"):
        assert len({part[name] for part in flags if name in part}) == 1


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--stages", "3", "--tensor", "2", "--replicas", "2", "--slots", "4096", "--threads", "1", "--device", "cuda"],
        ["--max-batch-size", "4", "--max-batch-tokens", "64", "--prefetch", "0", "--iteration-log", "log"],
        ["--policy", "request_level", "--dtype", "float16", "--host", "::1", "--log-level", "debug"],
        ["--policy", "request_level", "--microbatch-size", "4", "--without-habits", "holds_results,computes_ended"],
        ["--policy", "rra", "--encode-batch", "4", "--decode-steps", "8", "--stages", "2", "--layers", "1,1"],
        [
            *["--policy", "rra", "--encode-batch", "4", "--decode-steps", "8", "--decode-batch", "9"],
            *["--encode-tokens", "99", "--threshold-percent", "0"],
        ],
        ["--quantization", "int8"],
        ["--order", "deadline", "--eta-percent", "40", "--drop", "never"],
        ["--order", "sjf", "--utility", "inverse_length", "--patience-s", "5"],
    ],
    ids=[
        "defaults",
        "shape",
        "schedule",
        "baseline",
        "parts of the baseline",
        "cycle",
        "plan",
        "quantization",
        "order",
        "order to compare",
    ],
)
def test_every_part_accepts_the_flags_it_is_given(flags: list[str]) -> None:
    for spec in planned(*flags):
        settings = importlib.import_module(f"orca.{spec.role.name.lower()}.settings")
        settings.parse_settings([*spec.command[4:], *spec.restart_arguments], {})


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.SCHEDULER, Role.WORKER])
def test_an_option_wins_over_the_variable_of_a_part_also_with_its_default(role: Role) -> None:
    """Otherwise a variable would open a gateway, or switch a cache off, against the option of the command line."""
    settings = parse_settings(["--port", "0"])
    module = importlib.import_module(f"orca.{role.name.lower()}.settings")
    names = {each.name for each in fields(getattr(module, f"{role.name.title()}Settings"))}
    chosen = {each.name for each in fields(settings) if getattr(settings, each.name) not in (None, ())}
    [spec, *_] = [spec for spec in planned_by(settings) if spec.role is role]
    assert {_flag(name) for name in names & chosen} <= flags_of(spec).keys()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ORCA_SCHEDULER_ORDER": "edf"}, ["ORCA_SCHEDULER_ORDER (use --order)"]),
        ({"ORCA_SCHEDULER_ORDER": "deadline"}, []),
        ({"ORCA_SCHEDULER_PREFIX_CACHE": "false"}, ["ORCA_SCHEDULER_PREFIX_CACHE (use --prefix-cache)"]),
        ({"ORCA_GATEWAY_METRIC_NAMES": "vllm"}, ["ORCA_GATEWAY_METRIC_NAMES (use --metric-names)"]),
        ({"ORCA_SCHEDULER_ETA_PERCENT": "50", "ORCA_GATEWAY_CHOICES_MAX": "9", "ORDER": "edf"}, []),
        ({"ORCA_GATEWAY_POOL": "redis://a"}, ["ORCA_GATEWAY_POOL"]),
        (
            {"ORCA_WORKER_DTYPE": "float16", "ORCA_SCHEDULER_DTYPE": "float16"},
            ["ORCA_SCHEDULER_DTYPE (use --dtype)", "ORCA_WORKER_DTYPE (use --dtype)"],
        ),
        ({"ORCA_GATEWAY_MAX_MODEL_LEN": "9", "ORCA_GATEWAY_API_KEYS": "k"}, []),
        ({"ORCA_SCHEDULER_STAGES": "here:1"}, ["ORCA_SCHEDULER_STAGES"]),
        ({"ORCA_SCHEDULER_GROUP": "group-1"}, []),
    ],
    ids=[
        "another value",
        "the same value",
        "a switch",
        "a list",
        "no option decides it",
        "no option of its own",
        "of two parts",
        "read here",
        "an option that means something else",
        "the value of one part",
    ],
)
def test_variables_that_an_option_wins_over_are_named_once(variables: dict[str, str], expected: list[str]) -> None:
    settings = parse_settings(
        ["--port", "0", "--stages", "2", "--order", "deadline", "--replicas", "2", "--max-model-len", "64"]
    )
    assert ignored_variables(settings, planned_by(settings), variables) == expected


BATCHING = {
    "prefix_cache": ["--prefix-cache", "false"],
    "prefix_charge": ["--prefix-charge", "once"],
    "policy": ["--policy", "request_level"],
    "max_batch_size": ["--max-batch-size", "5"],
    "max_batch_tokens": ["--max-batch-tokens", "64"],
    "microbatch_size": ["--policy", "request_level", "--microbatch-size", "3"],
    "without_habits": ["--policy", "request_level", "--without-habits", "holds_results"],
    "encode_batch": [*CYCLE, "--encode-batch", "5"],
    "decode_steps": [*CYCLE, "--decode-steps", "5"],
    "decode_batch": [*CYCLE, "--decode-batch", "9"],
    "encode_tokens": [*CYCLE, "--encode-tokens", "99"],
    "threshold_percent": [*CYCLE, "--threshold-percent", "3"],
    "order": ["--order", "edf"],
    "utility": ["--order", "deadline", "--utility", "inverse_length"],
    "eta_percent": ["--order", "deadline", "--eta-percent", "40"],
    "patience_s": ["--order", "deadline", "--patience-s", "7"],
    "drop": ["--order", "deadline", "--drop", "expected"],
}
"""Options of `orca up` that give each setting of batching another value than its default."""


@pytest.mark.parametrize("name", [field.name for field in fields(BatchingSettings)])
def test_every_setting_of_batching_reaches_the_schedulers(name: str) -> None:
    asked = getattr(parse_settings(BATCHING[name]), name)
    assert asked != getattr(BatchingSettings(), name)
    specs = by_name(planned("--replicas", "2", *BATCHING[name]))
    for scheduler in ("scheduler-0", "scheduler-1"):
        found = scheduler_settings(specs[scheduler].command[4:], {})
        assert getattr(found, name) == asked


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--order", "newest"], "--order: 'newest' is not one of arrival, deadline, edf, sjf"),
        (["--utility", "equal"], "--utility: 'equal' is not for this order: not for arrival"),
        (["--drop", "never"], "--drop: 'never' is not for this order: not for arrival"),
        (["--order", "deadline", "--eta-percent", "100"], "--eta-percent: 100 is not 99 or less"),
        (["--order", "edf", "--eta-percent", "40"], "--eta-percent: 40 is not for this order: only for deadline"),
        (["--order", "deadline", "--patience-s", "0"], "--patience-s: 0 is not 1 or more"),
    ],
)
def test_an_order_that_a_scheduler_would_refuse_is_refused_before_the_start(flags: list[str], complaint: str) -> None:
    with pytest.raises(SettingError, match=f"^setting {complaint}$"):
        parse_settings(flags)


def test_only_a_restarted_scheduler_gets_the_flag_for_a_dead_predecessor() -> None:
    specs = by_name(planned())
    assert specs["scheduler-0"].restart_arguments == ("--predecessor-exited",)
    assert specs["worker-0.0"].restart_arguments == ()


def test_parts_get_the_layout_chosen_for_the_machine() -> None:
    settings = with_layout(parse_settings(["--port", "0"]), parameters=63_000_000, processors=4)
    specs = by_name(planned_by(settings))
    assert (flags_of(specs["worker-0.0"])["--threads"], flags_of(specs["worker-0.0"])["--stages"]) == ("3", "1")
    assert flags_of(specs["scheduler-0"])["--max-batch-tokens"] == "256"


def test_a_scheduler_of_whole_prompts_gets_no_token_bound() -> None:
    settings = with_layout(
        parse_settings(["--port", "0", "--max-batch-tokens", "0"]), parameters=63_000_000, processors=4
    )
    assert "--max-batch-tokens" not in flags_of(by_name(planned_by(settings))["scheduler-0"])


def test_a_group_gets_the_slots_that_a_full_batch_can_use_by_default() -> None:
    assert flags_of(by_name(planned())["worker-0.0"])["--slots-max"] == str(16 * MODEL.max_model_len)
    assert flags_of(by_name(planned("--slots", "64"))["worker-0.1"])["--slots-max"] == "64"


def devices_and_link(specs: list[ProcessSpec]) -> list[tuple[str, str]]:
    workers = [spec for spec in specs if spec.role is Role.WORKER]
    return [(spec.environment["CUDA_VISIBLE_DEVICES"], flags_of(spec)["--link"]) for spec in workers]


def test_gateways_and_stages_learn_the_length_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in (("gateway", "300"), ("worker-0.0", "300"), ("worker-0.1", "300")):
        assert flags_of(by_name(planned("--max-model-len", "300"))[name])["--max-model-len"] == expected
        assert "--max-model-len" not in flags_of(by_name(planned())[name])
    monkeypatch.setenv("ORCA_GATEWAY_MAX_MODEL_LEN", "200")
    assert flags_of(by_name(planned())["worker-0.0"])["--max-model-len"] == "200"


def test_each_rank_has_its_own_gpu_if_there_are_enough() -> None:
    specs = planned("--device", "cuda", "--tensor", "2", gpus=("0", "1", "4", "5"))
    assert devices_and_link(specs) == [("0,1", "auto"), ("4,5", "auto")]


def test_stages_share_gpus_through_gloo_if_there_are_too_few() -> None:
    assert devices_and_link(planned("--device", "cuda", gpus=("0",))) == [("0", "gloo"), ("0", "gloo")]


def test_gateways_differ_only_in_name_and_addresses() -> None:
    first, second = (spec for spec in planned("--gateways", "2") if spec.role is Role.GATEWAY)
    assert (first.name, second.name) == ("gateway", "gateway-1")
    assert first.address != second.address
    differing = {name for name, value in flags_of(first).items() if flags_of(second)[name] != value}
    assert differing == {"--port"}


def test_the_gateway_enforces_latency_goals_only_if_asked() -> None:
    [soft] = [spec for spec in planned() if spec.role is Role.GATEWAY]
    [hard] = [spec for spec in planned("--slo-enforce", "true") if spec.role is Role.GATEWAY]
    assert (flags_of(soft)["--slo-enforce"], flags_of(hard)["--slo-enforce"]) == ("false", "true")


def test_every_gateway_allows_the_origins_that_were_asked_for() -> None:
    origins = "https://chat.example.com,http://localhost:5173"
    gateways = [spec for spec in planned("--cors-origins", origins, "--gateways", "2") if spec.role is Role.GATEWAY]
    assert [flags_of(spec)["--cors-origins"] for spec in gateways] == [origins] * 2
    assert not any("--cors-origins" in flags_of(spec) for spec in planned() if spec.role is Role.GATEWAY)


def test_a_gateway_on_all_addresses_is_reached_on_loopback() -> None:
    [gateway] = [
        spec for spec in planned("--host", "0.0.0.0", "--open-to-network", "true") if spec.role is Role.GATEWAY
    ]
    assert flags_of(gateway)["--host"] == "0.0.0.0"
    assert flags_of(gateway)["--open-to-network"] == "true"
    assert gateway.address.startswith("127.0.0.1:")


@pytest.mark.parametrize("flags", [["--api-keys", "a,b"], []], ids=["flag", "variable"])
def test_keys_reach_the_gateway_by_its_environment_and_no_command_line(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCA_GATEWAY_API_KEYS", "c" if flags else "a, b")
    specs = planned(*flags)
    [gateway] = [spec for spec in specs if spec.role is Role.GATEWAY]
    assert gateway.environment["ORCA_GATEWAY_API_KEYS"] == "a,b"
    assert all("a,b" not in word for spec in specs for word in spec.command)
    assert "a,b" not in repr(gateway)


def test_a_public_host_needs_keys_or_an_explicit_flag() -> None:
    with pytest.raises(
        SettingError, match=r"--host 0\.0\.0\.0 can be reached from other machines .* --open-to-network true"
    ):
        parse_settings(["--host", "0.0.0.0"])


def test_with_keys_a_gateway_on_all_addresses_is_not_open(tmp_path: Path) -> None:
    specs = planned("--host", "0.0.0.0", "--api-keys-file", str(tmp_path / "keys"))
    [gateway] = [spec for spec in specs if spec.role is Role.GATEWAY]
    assert flags_of(gateway)["--api-keys-file"] == str(tmp_path / "keys")
    assert flags_of(gateway)["--open-to-network"] == "false"


def test_a_worker_gets_the_scheduler_of_its_group() -> None:
    assert by_name(planned("--replicas", "2"))["worker-1.0"].scheduler == "scheduler-1"


def test_the_settings_are_immutable() -> None:
    settings: UpSettings = parse_settings([])
    with pytest.raises(AttributeError):
        settings.stages = 3  # type: ignore[misc]


def test_parts_that_use_redis_get_the_path_of_its_password() -> None:
    told = {spec.name for spec in planned("--stages", "1") if spec.environment.get("ORCA_POOL_USER") == "u"}
    assert told == {"gateway", "scheduler-0"}

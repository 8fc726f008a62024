"""A gateway's metrics under vLLM's names, after real calls, and the metrics that readers of vLLM want."""

from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orca.core.domain.errors import SettingError
from orca.gateway.answer.delivery import TokenTimes
from orca.gateway.settings import GatewaySettings, parse_settings
from support.gateway.gateway_rig import Rig, rig, until

BOTH = GatewaySettings(model="tiny", metric_names=("orca", "vllm"))


async def scraped(one: Rig) -> Mapping[tuple[str, str], float]:
    """Return the values of all samples by name and finish reason, once no call is open."""
    await until(lambda: one.app.state.gateway.metrics.open_connections._value.get() == 0)
    families = text_string_to_metric_families((await one.client.get("/metrics")).text)
    return {
        (sample.name, sample.labels.get("finished_reason", "")): sample.value
        for family in families
        for sample in family.samples
    }


async def test_calls_count_under_both_names() -> None:
    async with rig(settings=BOTH) as one:
        await one.complete()
        await one.complete(n=2, stop="wör")
        values = await scraped(one)
    assert values["vllm:request_success_total", "length"] == 1
    assert values["vllm:request_success_total", "stop"] == 2
    for name in ("time_to_first_token_seconds_count", "generation_tokens_total", "request_prompt_tokens_sum"):
        assert values[f"vllm:{name}", ""] == values[f"orca_{name}", ""] > 0
    assert values["vllm:num_requests_waiting", ""] == values["orca_pool_requests_waiting", ""] == 0


async def test_without_the_setting_no_metric_has_vllms_name() -> None:
    async with rig() as one:
        assert not [name for name, _ in await scraped(one) if name.startswith("vllm:")]


async def test_the_wishes_and_the_longest_choice_of_a_prompt_are_counted() -> None:
    async with rig() as one:
        await one.complete(n=3, max_tokens=4, ignore_eos=True)
        await one.complete(max_tokens=2, ignore_eos=True)
        values = await scraped(one)
    assert values["orca_request_params_n_count", ""] == 2
    assert values["orca_request_params_n_sum", ""] == 3 + 1
    assert values["orca_request_params_max_tokens_sum", ""] == 3 * 4 + 2
    assert values["orca_request_max_num_generation_tokens_sum", ""] == 4 + 2
    assert values["orca_request_time_per_output_token_seconds_count", ""] == 3 + 1


def test_the_mean_gap_of_a_request_is_between_its_own_tokens() -> None:
    times = TokenTimes()
    for request_id, now in (("a", 1.0), ("b", 1.5), ("a", 2.0), ("b", 2.0), ("a", 4.0)):
        times.record(request_id, now)
    assert times.mean_gap("a", 3) == 1.5
    assert times.mean_gap("b", 2) == 0.5
    assert times.mean_gap("b", 1) is None
    assert times.mean_gap("c", 2) is None


@pytest.mark.parametrize(
    ("text", "names"), [("orca", ("orca",)), ("vllm", ("vllm",)), ("orca, vllm", ("orca", "vllm"))]
)
def test_names_are_read_from_flag_and_variable(text: str, names: tuple[str, ...]) -> None:
    assert parse_settings(["--model", "m", "--metric-names", text], {}).metric_names == names
    assert parse_settings(["--model", "m"], {"ORCA_GATEWAY_METRIC_NAMES": text}).metric_names == names
    assert parse_settings(["--model", "m"], {}).metric_names == ("orca",)


def test_an_unknown_word_stops_the_start_with_a_sentence_that_names_it() -> None:
    with pytest.raises(SettingError, match=r"^setting --metric-names: 'prometheus' is not one of orca, vllm$"):
        parse_settings(["--model", "m", "--metric-names", "orca,prometheus"], {})
    with pytest.raises(SettingError, match="ORCA_GATEWAY_METRIC_NAMES: 'VLLM' is not one of orca, vllm"):
        parse_settings(["--model", "m"], {"ORCA_GATEWAY_METRIC_NAMES": "VLLM"})

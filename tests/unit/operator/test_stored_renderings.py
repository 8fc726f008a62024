"""A spec that has not changed is rendered as an earlier release rendered it, byte for byte."""

import pytest

from support.operator.stored_renderings import SPECS, as_text, rendered, stored


@pytest.mark.parametrize("name", SPECS)
def test_an_upgrade_of_the_operator_changes_no_byte_of_what_a_spec_renders(name: str) -> None:
    found, before = rendered(name), stored()[name]
    assert found.keys() == before.keys()
    for key, manifest in before.items():
        assert as_text(found[key]) == as_text(manifest), key

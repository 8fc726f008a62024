"""Files of Jobs on their way through the pool."""

import pytest

from orca.core.job_files import read_files, to_body


def test_files_come_as_they_were_given() -> None:
    files = {"plan.json": '{"a": 1}\n', "summary": "99 % in 7.4 s, \u00e4"}
    assert read_files(to_body(files)) == files


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"a/b": "x"}', b'{"": "x"}', b'{"a": 1}', b'{"a": null}'])
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        read_files(body)

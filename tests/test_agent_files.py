"""llms.txt and AGENTS.md are those that the documentation's sources give."""

import pytest

pytest.importorskip("yaml")

import agent_files


@pytest.mark.parametrize("path", agent_files.files(), ids=lambda path: path.name)
def test_files_for_agents_are_up_to_date(path) -> None:
    assert path.read_text("utf-8") == agent_files.files()[path], "python docs/generate/agent_files.py"

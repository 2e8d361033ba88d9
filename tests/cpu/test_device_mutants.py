"""The mutants that the GPU tests run can still be made: every piece that they replace is in the source, once."""

import pytest

from tests.ranks.mutants import MUTANTS, SIGNAL_MUTANTS, SOURCES, Edit, edited_sources

ALL = {**MUTANTS, **SIGNAL_MUTANTS}


@pytest.mark.parametrize("name", ALL)
def test_a_mutant_differs_from_its_control_only_where_it_says(name, tmp_path):
    mutant = ALL[name]
    control = edited_sources(mutant.legal, tmp_path / "control")
    edited = edited_sources((*mutant.legal, *mutant.edits), tmp_path / "mutant")
    differing = {path.name for path in control.iterdir() if path.read_text() != (edited / path.name).read_text()}
    assert differing == {edit.file for edit in mutant.edits}
    included = {f"{mutant.stem}.cu", "wait.cuh", "dependents.cuh", "types.cuh"}
    if mutant.stem == "all_reduce_lamport":
        included.add("lamport.cuh")
    assert differing <= included, "the edited file is not compiled into the mutant"


def test_a_stale_edit_is_an_error(tmp_path):
    text = (SOURCES / "wait.cuh").read_text()
    assert text.count("return true;") > 1
    for old in ("no such piece", "return true;"):
        with pytest.raises(ValueError, match="not once"):
            edited_sources((Edit("wait.cuh", old, ""),), tmp_path / "stale")

"""Models are found where they are given, loaded once, and no others are opened."""

import shutil

import pytest
import torch

from mvm.app.service import Shelf, offered
from mvm.published import shipped_folder, shipped_models


@pytest.fixture
def exported(tmp_path):
    shutil.copytree(shipped_folder("digits"), tmp_path / "runs" / "mine")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def test_without_names_the_shipped_models_smallest_first():
    assert sorted(offered([])) == shipped_models()
    assert offered([])[0] == "digits"


def test_given_ones_come_first_and_a_folder_stands_for_what_it_holds(exported):
    mine = str(exported / "mine")
    assert offered([mine])[:2] == [mine, "digits"]
    assert offered([str(exported)])[:2] == [mine, "digits"]
    assert offered(["digits", mine])[:2] == ["digits", mine]


def test_a_folder_without_models_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a run or an exported model, nor a folder that holds any"):
        offered([str(tmp_path)])


def test_a_model_is_loaded_once_and_one_not_offered_never(exported):
    shelf = Shelf(["digits"], torch.device("cpu"))
    assert shelf.get("digits") is shelf.get("digits")
    with pytest.raises(ValueError, match=r"model '.*mine' is not on this page; it has: digits"):
        shelf.get(str(exported / "mine"))


def test_a_page_without_models_is_refused():
    with pytest.raises(ValueError, match="there is no model to show"):
        Shelf([], torch.device("cpu"))

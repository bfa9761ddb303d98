"""The packages are layered: tools/house.py finds no cycle here, and finds one where there is one."""

import ast
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def house():
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools" / "house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_package_imports_itself_through_others():
    order, cycle = house().package_order(house().modules(ROOT / "src"))
    assert cycle == []
    assert order.index("mvm.path") < order.index("mvm.recipes") < order.index("mvm.training")


def test_a_cycle_of_packages_is_found_and_a_lazy_import_is_none():
    trees = {"mvm.a.x": "from mvm.b import y", "mvm.b.y": "import mvm.c", "mvm.c": "def f():\n    import mvm.a.x"}
    assert house().package_order({name: ast.parse(text) for name, text in trees.items()})[1] == []
    trees["mvm.c"] = "from mvm.a import x"
    found = house().package_order({name: ast.parse(text) for name, text in trees.items()})[1]
    assert set(found) == {"mvm.a", "mvm.b", "mvm.c"}


def test_counts_leave_out_docstrings_and_comments(tmp_path):
    (tmp_path / "x.py").write_text('"""One\ntwo."""\n\n# three\ndef f():\n    """Four."""\n    return 5\n')
    assert house().code_lines(tmp_path / "x.py") == 2


def test_the_core_is_what_a_reader_is_sent_to():
    """Every file of path, loss, solver and network in CONTRIBUTING's table of what to read, and no other."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| to know | read |")[2].partition("\n\n")[0]
    listed = re.findall(r"`((?:path|objective|solver|network)/\w+\.py)`", table)
    assert sorted(listed) == sorted(house().CORE)
    assert all((ROOT / "src" / "mvm" / name).is_file() for name in listed)

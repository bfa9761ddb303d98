"""The comparison of two source trees: what its figures are, and that both trees are really run, in turn."""

from pathlib import Path

from programs import imported

two_trees = imported("two_trees")


def test_the_ratio_is_new_over_old_of_the_medians_with_its_range():
    old, new = [{"a": 10.0}, {"a": 20.0}, {"a": 40.0}], [{"a": 11.0}, {"a": 18.0}, {"a": 44.0}]
    (row,) = two_trees.compared(old, new)
    assert (row["old"], row["new"], row["ratio"], row["least"], row["most"]) == (20, 18, 0.9, 0.9, 1.1)


def test_each_tree_runs_its_own_package_in_turn(tmp_path, monkeypatch, capsys):
    trees = [tmp_path / name for name in ("old", "new")]
    for tree in trees:
        (tree / "src/mvm").mkdir(parents=True)
        (tree / "src/mvm/__init__.py").touch()
        (tree / "src/mvm/__main__.py").write_text(
            "import os, pathlib, sys\n"
            f"pathlib.Path(sys.argv[-1]).write_bytes({tree.name.encode()!r} if 'own' in sys.argv else b'same')\n"
            f"open(r'{tmp_path}/order', 'a').write('{tree.name} ')\n"
        )
    for text, equal in (("sample", "yes"), ("sample own", "no")):
        monkeypatch.setattr("sys.argv", ["two_trees", *map(str, trees), "--command", text, "--rounds", "1"])
        two_trees.main()
        assert f"written files equal: {equal}" in capsys.readouterr().out
    assert Path(tmp_path / "order").read_text().split() == ["old", "new", "new", "old"] * 2

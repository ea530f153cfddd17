from decodekit.utilities.exact import Exact


def test_is_100_for_the_same_text() -> None:
    assert Exact().pairwise(["a", " b\n", "c"], ["b", "a"]).tolist() == [[0, 100], [100, 0], [0, 0]]

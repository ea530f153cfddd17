import json

import pytest

pytest.importorskip("ray.data")


def test_two_workers_of_a_local_cluster_decode_the_rows_of_one(tiny_folder, tmp_path, monkeypatch) -> None:
    from decodekit.integrations.cluster import map_on_ray
    from decodekit.integrations.models import load_model
    from decodekit.recipe import load_recipe
    from decodekit.runtime.engine import Engine
    from decodekit.runtime.jsonl import Line
    from decodekit.runtime.mapping import Mapper

    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    recipe = load_recipe({"generation": {"max_new_tokens": 4, "do_sample": True, "seed": 2}, "rules": []})
    lines = [Line(number, {"id": f"r{number}", "prompt": "ab" * (number % 5 + 1)}) for number in range(1, 101)]
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        rows = list(
            map_on_ray(recipe, lines, "local", model=str(tiny_folder), engine={"slots": 8}, mapper={"raw": True})
        )
    finally:
        ray.shutdown()
    model, tokenizer = load_model(str(tiny_folder))
    alone = list(Mapper(Engine(model, tokenizer, recipe, slots=8), recipe, raw=True).run(lines))

    def texts(results):
        return sorted((row["id"], row["text"]) for row in results)

    assert texts(rows) == texts(alone)
    assert json.dumps(rows)

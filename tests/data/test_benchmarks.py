"""The measurements of the data path write down what they claim."""

import json

from samu_lm.benchmarks import loader, preparation


def test_preparing_and_reading_are_measured(tmp_path, capsys):
    output = tmp_path / "prepare.json"
    preparation.main([str(tmp_path), "--gigabytes", "0.002", "--output", str(output), "--", "workers=1"])
    record = json.loads(output.read_text())
    result = record["result"]
    assert result["exit_status"] == 0
    assert 2_000_000 <= result["written"]["bytes"] < 2_200_000
    assert 30 < result["peak_resident_mib_of_all_processes"] < 1024
    assert result["mb_per_second"] > 0 and result["mb_per_processor_second"] > 0
    assert str(tmp_path) not in output.read_text(), "no path of one machine"
    assert {"command", "packages", "platform", "python", "git_commit"} <= record["environment"].keys()
    short = ["--seq-len", "64", "--batch-size", "4", "--workers", "0", "1", "--seconds", "0.2"]
    loader.main([str(tmp_path / "shards"), *short, "--output", str(tmp_path / "loader.json")])
    results = json.loads((tmp_path / "loader.json").read_text())["results"]
    assert [(r["cold"], r["packing"], r["workers"]) for r in results] == [
        (cold, packing, workers) for cold in (False, True) for packing in ("concat", "best_fit") for workers in (0, 1)
    ]
    assert all(r["row_tokens"] > 0 for r in results)

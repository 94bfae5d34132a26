"""The verbs end to end, on tiny models and on the golden ones: what they print, record and return."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from command_worker import Worker
from trainfit.cli.main import main
from trainfit.cli.measure import EXIT_CODES
from trainfit.records import read
from trainfit.spec.result import Estimate, Measurement

Captured = pytest.CaptureFixture[str]


def as_json(arguments: list[str], capsys: Captured) -> Any:
    assert main([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    return json.loads(out)


def test_llama_8b_warm_is_the_same_text_without_torch(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What either takes is in test_speed.py."""
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["predict", "llama-3.1-8b-h200", "--verbose"]) == 0
    text = capsys.readouterr().out
    code = (
        "import sys; from trainfit.cli.main import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "predict", "llama-3.1-8b-h200", "--verbose"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr.splitlines()[-1] == "False"
    assert done.stdout == text
    assert max(len(line) for line in text.splitlines()) <= 80
    shown = " ".join(text.split())
    for words in (
        "FITS on h200",
        "8.03B parameters",
        "activations",
        "steady step",
        "MFU",
        "masked attention",
    ):
        assert words in shown


def test_predict_json_is_the_noun(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "records.sqlite"
    settings = ["--set", "hardware.gpu=l4", "--set", "batch.micro=2", "--record", str(file)]
    data = as_json(["predict", "tiny-cpu", *settings], capsys)
    estimate = Estimate.model_validate_json(json.dumps(data))
    assert estimate.fits
    assert estimate.breakdown.total == estimate.peak_allocated_bytes
    (record,) = read(file)
    assert record.estimate == estimate
    assert record.recipe["batch"]["micro"] == 2


def test_does_not_fit_says_by_how_much_and_a_price_is_taken(capsys: Captured) -> None:
    assert main(["predict", "llama-3.1-8b-h200", "--gpu", "rtx-4090", "--price", "3.5", "--no-advice"]) == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT on rtx-4090" in out
    assert "too much" in out
    assert "3.50 $ an hour" in out


@pytest.mark.parametrize("verb", ["predict", "explain"])
def test_short_options_set_fields(verb: str, capsys: Captured) -> None:
    short = ["--gpu", "h200", "--count", "2", "--seq", "64"]
    fields = ["hardware.gpu=h200", "hardware.count=2", "batch.seq=64"]
    long = [word for field in fields for word in ("--set", field)]
    assert as_json([verb, "tiny-cpu", *short], capsys) == as_json([verb, "tiny-cpu", *long], capsys)
    for value, problem in (("1", "1: a sequence of one token"), ("8x", "'8x': should be a whole number")):
        assert main([verb, "tiny-cpu", "--seq", value]) == 65
        assert capsys.readouterr().err.startswith(f"trainfit: error: --seq: batch.seq = {problem}")


@pytest.mark.slow
def test_a_gib_budget_is_planned_and_the_plan_can_be_written_out(capsys: Captured) -> None:
    more = ["--set", "batch.micro=16"]
    free = as_json(["predict", "tiny-cpu", *more], capsys)["peak_allocated_bytes"]
    budget_gib = 0.8 * free / 2**30
    budget = ["tiny-cpu", *more, "--set", f"recompute={{budget_gib: {budget_gib}}}"]
    planned = as_json(["predict", *budget], capsys)
    assert planned["peak_allocated_bytes"] <= budget_gib * 2**30 < free
    (plan,) = [text for text in planned["assumptions"] if text.startswith("recompute: {budget_gib")]
    written = plan.partition(" is planned as ")[2]
    explained = as_json(["explain", "tiny-cpu", *more, "--set", f"recompute={written}"], capsys)
    for name in ("recipe_id", "peak_allocated_bytes"):
        assert explained[name] == planned[name]


def test_a_budget_below_every_plan_is_refused_with_the_least(capsys: Captured) -> None:
    assert main(["train", "tiny-cpu", "--out", "nowhere", "--set", "recompute.budget_gib=0.001"]) == 65
    (line,) = capsys.readouterr().err.splitlines()
    assert "--set: recompute.budget_gib = 0.001: the least that any plan reaches is 0.0" in line


def test_what_waits_on_the_host_fits_the_terminal(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    more = ["--set", "recompute=full", "--set", "offload.activations=true", "--gpu", "h200"]
    assert main(["predict", "tiny-cpu", *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (host,) = [line for line in lines if "pinned on the host" in line]
    assert host.endswith("768.00 KiB")  # Of all blocks but the last: 3 x (4 x 128 tokens) x 128 x 4 bytes.


def test_measured_on_this_machine_within_three_percent(forks: None, capsys: Captured, tmp_path: Path) -> None:
    """Each technique, to the byte: test_virtual_cpu.py."""
    file = str(tmp_path / "records.sqlite")
    recipe = "tiny-cpu --set batch.seq=64 --set recompute=full --set adapter.kind=lora --record".split()
    predicted = as_json(["predict", *recipe, file], capsys)
    measured = as_json(["measure", *recipe, file, "--device", "cpu", "--steps", "2"], capsys)
    assert Measurement.model_validate_json(json.dumps(measured)).status == "done"
    assert measured["recipe_id"] == predicted["recipe_id"]
    page = tmp_path / "report.html"
    (compared,) = as_json(["report", file, "--html", str(page)], capsys)
    assert abs(compared["errors"]["peak_allocated_bytes"]) < 0.03
    assert "tiny-llama-demo" in page.read_text()
    assert main(["report", file]) == 0
    assert "1 of 1 recipes within 3%" in capsys.readouterr().out
    assert main(["records", "list", file]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "2" in line[:4]]) == 2
    out, again = tmp_path / "records.jsonl", tmp_path / "again.sqlite"
    assert main(["records", "export", file, str(out)]) == 0
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == ["predict", "measure"]
    for _ in range(2):  # The second time adds nothing.
        assert main(["records", "import", str(again), str(out)]) == 0
        kinds = [record["kind"] for record in as_json(["records", "list", str(again)], capsys)]
        assert kinds == ["predict", "measure"]


def test_a_measurement_that_its_time_limit_ends_says_so_and_exits_75(
    capsys: Captured, tmp_path: Path
) -> None:
    file = str(tmp_path / "records.sqlite")
    limit = ["--device", "cpu", "--timeout", "0.01", "--record", file]
    assert main(["measure", "tiny-cpu", *limit, "--json"]) == 75
    assert json.loads(capsys.readouterr().out)["status"] == "timeout"
    assert main(["records", "list", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["measurement"]["status"] == "timeout"


def test_every_end_of_a_measurement_has_its_exit_code() -> None:
    assert {*get_args(Measurement.model_fields["status"].annotation)} == {*EXIT_CODES}


LLAMA_405B = ["mfu", "--model", "llama-3.1-405b", "--batch", "16", "--seq", "64", "--step-s", "30",
              "--gpu", "mi300x", "--count", "8", "--peak-flops", "1.3e15"]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "percent"),
    [
        (["--attention", "full"], "0.80"),
        ([], "0.80"),
        (["--adapter", "lora"], "0.53"),
        (["--adapter", "lora", "--attention", "full"], "0.53"),
    ],
)
def test_mfu_of_llama_405b(more: list[str], percent: str, capsys: Captured) -> None:
    """Published: 0.80 % for full fine-tuning, 0.53 % for LoRA by 6N and 4N."""
    data = as_json([*LLAMA_405B, *more], capsys)
    assert f"{data['mfu']:.2%}" == f"{percent}%"
    assert f"{data['closed_form']['mfu']:.2%}" == f"{percent}%"
    assert data["hfu"] == pytest.approx(data["mfu"], rel=0.01)
    if "lora" in more:
        assert f"{data['of_full_training']['mfu']:.2%}" == "0.80%"


def test_45_and_60_of_an_agent_over_a_frozen_base_are_30_and_45(capsys: Captured) -> None:
    """The 6N and 8N of full training with recomputation, and the 4N and 6N that an adapter's run needs."""
    model = "mfu --model qwen2.5-14b --adapter lora --batch 16 --seq 1024 --gpu h100-sxm --count 2".split()
    data = as_json([*model, "--recompute", "full", "--mfu", "0.303"], capsys)
    whole = data["of_full_training"]
    assert (round(whole["mfu"], 2), round(whole["hfu"], 2)) == (0.45, 0.60)
    assert round(data["hfu"], 2) == pytest.approx(0.45, abs=0.01)


def test_full_recomputation_reads_45_as_60(capsys: Captured) -> None:
    """By the closed form, one more forward: 8N over 6N. A block's last product and the head run once."""
    model = "mfu --model llama-2-7b --batch 2 --seq 512 --gpu h100-sxm --recompute full --mfu 0.45".split()
    data = as_json(model, capsys)
    assert data["mfu"] == pytest.approx(0.45)
    assert 0.55 < data["hfu"] < 0.60
    closed = data["closed_form"]
    assert closed["hfu"] == pytest.approx(0.60)
    assert closed["convention"].endswith("recomputation as one whole forward, an upper bound")


def test_gpu_hours_of_a_published_run(capsys: Captured) -> None:
    """Llama 3.1 405B: 15.6e12 tokens in 30.84M H100 hours at 38 to 43 % BF16 MFU
    (https://arxiv.org/abs/2407.21783, 3.3).

    The published hours include interruptions and longer contexts.
    """
    step = ["mfu", "--model", "llama-3.1-405b", "--batch", "2048", "--seq", "8192", "--mfu", "0.4"]
    data = as_json(
        [*step, "--tokens", "15.6e12", "--gpu", "h100-sxm", "--count", "16384", "--price", "2"], capsys
    )
    assert 0.8 * 30.84e6 < data["gpu_hours"] < 30.84e6
    assert data["dollars"] == pytest.approx(2 * data["gpu_hours"])
    assert data["run_s"] * 16384 / 3600 == pytest.approx(data["gpu_hours"])
    assert data["mfu"] == pytest.approx(0.4)


def test_a_batch_needs_so_many_times_one_sequence(capsys: Captured) -> None:
    words = "mfu --model gpt2 --seq 1024 --step-s 1 --batch".split()
    one, many = (as_json([*words, batch], capsys)["model_flops"] for batch in ("1", "4096"))
    assert many == 4096 * one


GPT2 = "mfu --model gpt2 --batch 1 --seq 8"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("mfu", 2),
        ("mfu --model gpt2", 2),
        ("mfu --gpu-hours nan", 2),
        (f"{GPT2} --step-s 1 --mfu 0.4", 2),
        (f"{GPT2} --mfu 0", 2),
        (f"{GPT2} --mfu 40", 2),
        (f"{GPT2} --step-s 0", 2),
        (f"{GPT2} --step-s 1 --gpu cpu", 65),
        ("mfu --gpu-hours 3 --gpu nope", 65),
    ],
)
def test_mfu_refuses(arguments: str, code: int, capsys: Captured) -> None:
    assert main(arguments.split()) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


STOP_AFTER_STEPS = """
import os, pathlib, signal, threading, time

def stop():
    log = pathlib.Path({log!r})
    while not (log.exists() and log.read_text().count("\\n") > 3):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=stop, daemon=True).start()
"""


def test_train_stops_with_75_and_resumes(tmp_path: Path, worker: Worker) -> None:
    """SIGTERM saves and exits 75; --resume trains to the end; --json prints the summary alone."""
    words = "train tiny-cpu --set batch.seq=32 --data stories:200 --out run --device cpu --no-tensorboard"
    limits = {"folder": tmp_path, "memory_bytes": None}
    first = STOP_AFTER_STEPS.format(log=str(tmp_path / "run" / "log.jsonl"))
    ended = worker.run(*words.split(), "--json", "--steps", "100000", first=first, **limits)
    assert ended.code == 75, ended.err
    stopped = json.loads(ended.out)
    assert stopped["status"] == "stopped"
    steps = str(stopped["steps"] + 2)
    resumed = worker.run(*words.split(), "--json", "--steps", steps, "--resume", **limits)
    assert resumed.code == 0, resumed.err
    assert json.loads(resumed.out)["first_step"] == stopped["steps"]


def test_training_twice_into_one_folder_is_65(tmp_path: Path, capsys: Captured) -> None:
    words = "train tiny-cpu --set batch.seq=32 --data stories:100 --steps 1 --device cpu --no-tensorboard"
    arguments = [*words.split(), "--eval-fraction", "0", "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    assert "DONE" in capsys.readouterr().out
    assert main(arguments) == 65


OWN = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip


def test_a_config_json_is_a_recipe_with_every_default(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OWN))
    # Embedding and head 2 x 6,400; two layers of 4 x 4,096 + 3 x 8,192 + 2 x 64; the last norm 64.
    params = 2 * 6_400 + 2 * (4 * 4_096 + 3 * 8_192 + 2 * 64) + 64
    found = as_json(["predict", str(folder), "--set", "batch.seq=32"], capsys)
    assert found["params"] == params
    settings = ["--set", "batch.seq=32", "--set", "model.config.num_hidden_layers=1"]
    one_layer = as_json(["predict", str(folder / "config.json"), *settings], capsys)
    assert params - one_layer["params"] == 4 * 4_096 + 3 * 8_192 + 2 * 64


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_key_value_heads": 3}, "model.config.num_key_value_heads = 3: does not divide the 4"),
        (
            {"auto_map": {"AutoModel": "a.B"}, "model_type": "odd"},
            "code of its repository, which is never run",
        ),
        ({"model_type": "bert"}, "an encoder"),
        ({"hidden_size": 2**40}, "model.config.hidden_size = 1099511627776: not a size"),
    ],
)
def test_a_bad_config_json_is_65_and_one_line(
    changed: dict, says: str, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(OWN | changed))
    assert main(["predict", str(file), "--set", "batch.seq=32"]) == 65
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"trainfit: error: {file}: ")
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("measure tiny-cpu --device gpu", "device = 'gpu': no such device"),
        ("measure tiny-cpu --device cpu --set attention=efficient", "runs on CUDA only"),
        ("predict tiny-cpu --set attention=efficient", "runs on CUDA only"),
        ("predict tiny-cpu --gpu tpu-v5p", "--gpu: hardware.gpu = 'tpu-v5p': no kernels are modelled"),
    ],
)
def test_what_a_device_lacks_is_65_before_any_work(arguments: str, says: str, capsys: Captured) -> None:
    assert main(arguments.split()) == 65
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert says in line


def test_a_training_that_cannot_be_recorded_does_not_begin(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "run"
    assert main(["train", "tiny-cpu", "--out", str(out), "--record", str(tmp_path / "no" / "r.sqlite")]) == 74
    assert capsys.readouterr().err == f"trainfit: error: {tmp_path / 'no'}: No such file or directory\n"
    assert not out.exists()


def test_communication_of_a_cpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["communication", "--hidden", "64", "--feed-forward", "256", "--gpu", "cpu"]) == 65
    assert "--gpu = 'cpu': this machine has no links between devices; name an acc" in capsys.readouterr().err

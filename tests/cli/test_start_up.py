"""What a predicting process leaves unimported changes no byte, and is there when it is used."""

import json
import os
import subprocess
import sys

import pytest

import trainfit
from tiny_recipe import TINY_LLAMA
from trainfit.ledger.ledger import RepeatError
from trainfit.virtual.compile.forked import begin

FIELDS = {"gpu": "h200", "seq": 256}
PLAIN = {"model_type": "trainfit", "position_embedding": "learned", "gated_mlp": False, "hidden_act": "relu"}
SMALL = {"model": {"config": TINY_LLAMA | PLAIN, "implementation": "native"}, "compile": "block"}
SCRIPT = f"""
import json, sys
from trainfit.prediction import start_up
from trainfit.virtual import own_process
import trainfit
own_process.is_own_process = True
start_up.import_little(compiles=False)
estimate = trainfit.predict("gpt2", use_cache=False, **{FIELDS})
early = [name for name in ("torch._dynamo.symbolic_convert", "torchao") if name in sys.modules]
import torch
def double(x):
    return later(2 * x)
@torch._disable_dynamo
def later(x):
    return x + 1
plain = double(torch.ones(2)).tolist()
graphs = []
def backend(graph, inputs):
    graphs.append(str(graph.code))
    return graph
compiled = torch.compile(double, backend=backend)(torch.ones(2)).tolist()
print(json.dumps([estimate.model_dump(mode="json"), early, plain, compiled, len(graphs), "1" in graphs[0]]))
"""


def test_an_eager_prediction_needs_no_compiler_and_leaves_it_whole() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    estimate, early, plain, compiled, num_graphs, has_later = json.loads(done.stdout)
    assert early == []
    assert plain == compiled == [3.0, 3.0]
    assert (num_graphs, has_later) == (1, False)  # Dynamo leaves out the function that was decorated early.
    expected = trainfit.predict("gpt2", use_cache=False, **FIELDS)
    assert estimate == json.loads(json.dumps(expected.model_dump(mode="json")))


COMPILED = f"""
import json, os
from trainfit.prediction import start_up
from trainfit.virtual import own_process
import trainfit
own_process.is_own_process = True
start_up.import_little(compiles=True)
os.sched_getaffinity = lambda pid: {{0, 1}}
from trainfit.virtual.compile import generate
forks, begin = [], generate.begin
def counted(function):
    forks.append(function)
    return begin(function)
generate.begin = counted
estimate = trainfit.predict({SMALL}, use_cache=False, gpu="h200", seq=32)
from torch._inductor.codegen.common import KernelTemplate
rendered = KernelTemplate._template_from_string("{{{{ a }}}} and {{{{ a + 1 }}}}").render(a=7)
print(json.dumps([estimate.model_dump(mode="json"), len(forks), rendered]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no process is forked elsewhere")
def test_code_generated_in_a_fork_is_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    estimate, num_forks, rendered = json.loads(done.stdout)
    assert num_forks == 1  # The forward's; equal blocks are compiled once.
    assert rendered == "7 and 8"
    expected = trainfit.predict(SMALL, use_cache=False, gpu="h200", seq=32)
    assert estimate == json.loads(json.dumps(expected.model_dump(mode="json")))


def test_a_fork_returns_results_and_exceptions() -> None:
    assert begin(lambda: [1, "two"])() == [1, "two"]
    with pytest.raises(RepeatError, match="not alike"):
        begin(_refused)()
    with pytest.raises(RuntimeError, match="ended"):
        begin(lambda: os._exit(1))()


def _refused() -> None:
    raise RepeatError("not alike")

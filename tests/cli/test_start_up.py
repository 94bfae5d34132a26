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

EAGER = {"recipe": "gpt2", "gpu": "h200", "seq": 256}
SEVERAL = {**EAGER, "count": 2}
PLAIN = {"model_type": "trainfit", "position_embedding": "learned", "gated_mlp": False, "hidden_act": "relu"}
SMALL = {"model": {"config": TINY_LLAMA | PLAIN, "implementation": "native"}, "compile": "block"}
COMPILED = {"recipe": SMALL, "gpu": "h200", "seq": 32}
SCRIPT = f"""
import json, os, sys
from trainfit.prediction import start_up
from trainfit.virtual import own_process
import trainfit
own_process.is_own_process = True
start_up.import_little(compiles=False)
eager = [trainfit.predict(use_cache=False, **{EAGER})]
early = [name for name in ("torch._dynamo.symbolic_convert", "torchao") if name in sys.modules]
eager.append(trainfit.predict(use_cache=False, **{SEVERAL}))
import torch
if torch.__version__ >= "2.12":  # FSDP2 of 2.11 imports the compiler.
    early += [name for name in ("torch._dynamo.symbolic_convert", "torchao") if name in sys.modules]
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
os.sched_getaffinity = lambda pid: {{0, 1}}
from trainfit.virtual.compile import generate
forks, begin = [], generate.begin
def counted(function):
    forks.append(function)
    return begin(function)
generate.begin = counted
forked = trainfit.predict(use_cache=False, **{COMPILED})
num_forks = len(forks)
generate._strides_of_lowered = lambda output: None
again = trainfit.predict(use_cache=False, **{COMPILED})
estimates = [one.model_dump(mode="json") for one in (*eager, forked, again)]
from torch._inductor.codegen.common import KernelTemplate
rendered = KernelTemplate._template_from_string("{{{{ a }}}} and {{{{ a + 1 }}}}").render(a=7)
found = [len(graphs), "1" in graphs[0], num_forks, len(forks)]
print(json.dumps([rendered, estimates, early, plain, compiled, *found]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no process is forked elsewhere")
def test_an_eager_prediction_needs_no_compiler_and_leaves_it_whole() -> None:
    """What is compiled afterwards is as anywhere else, and code generated in a fork is the same.

    So it is where a forward lowered in a fork has other strides than its backward was lowered with.
    """
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rendered, estimates, early, plain, compiled, num_graphs, has_later, *num_forks = json.loads(done.stdout)
    assert rendered == "7 and 8"
    assert early == []
    assert plain == compiled == [3.0, 3.0]
    assert (num_graphs, has_later) == (1, False)  # Dynamo leaves out the function that was decorated early.
    assert num_forks == [2, 6]  # Forward and backward, of one block; again twice where strides differ.
    for found, fields in zip(estimates, (EAGER, SEVERAL, COMPILED, COMPILED), strict=True):
        expected = trainfit.predict(use_cache=False, **fields)
        assert found == json.loads(json.dumps(expected.model_dump(mode="json")))


def test_a_fork_returns_results_and_exceptions() -> None:
    assert begin(lambda: [1, "two"])() == [1, "two"]
    with pytest.raises(RepeatError, match="not alike"):
        begin(_refused)()
    with pytest.raises(RuntimeError, match="ended"):
        begin(lambda: os._exit(1))()


def _refused() -> None:
    raise RepeatError("not alike")

"""What a predicting process leaves unimported changes no byte, and is there when it is used."""

import json
import subprocess
import sys

import trainfit

FIELDS = {"gpu": "h200", "seq": 256}
SCRIPT = f"""
import json, sys
from trainfit.prediction import start_up
import trainfit
start_up.is_own_process = True
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

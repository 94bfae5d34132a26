"""Extract from the git history the prediction of each recipe as it was first committed.

``python -m evidence.scripts.accuracy.first_predicted OUT.jsonl FILE ...`` reads every committed version of
the files of records and writes, for each recipe, the prediction of the oldest version that holds one. Later
commits replaced many of them by predictions of corrected code. Each line is as it was committed, with the
digest that lines carry since and the id that its recipe has today.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from trainfit.spec.provenance import DIGEST, digest_of, from_line, with_id_of_today


def main(arguments: list[str] | None = None) -> int:
    """Write the first prediction of each recipe; the exit code is 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("files", nargs="+", metavar="FILE", help="file of records that git tracks")
    options = parser.parse_args(arguments)
    found = first_predictions(options.files)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(f"{line}\n" for line in found.values()), "utf-8")
    print(f"{len(found)} predictions in {options.out}")
    return 0


def first_predictions(files: list[str]) -> dict[str, str]:
    """Return recipe id -> line of the oldest committed prediction."""
    found: dict[str, str] = {}
    for commit in _git("log", "--reverse", "--topo-order", "--format=%H", "--", *files).split():
        for file in _git("ls-tree", "-r", "--name-only", commit, "--", *files).splitlines():
            for line in _git("show", f"{commit}:{file}").splitlines():
                data = with_id_of_today(json.loads(line))
                if data["kind"] == "predict" and data["recipe_id"] not in found:
                    found[data["recipe_id"]] = _with_digest(data, f"{commit}:{file}")
    return found


def _with_digest(data: dict[str, object], where: str) -> str:
    line = json.dumps({**data, DIGEST: digest_of(data)}, ensure_ascii=False, separators=(",", ":"))
    from_line(line, where)  # A line that today's code does not read must not be kept.
    return line


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())

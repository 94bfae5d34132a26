"""Records as versions before 2026-11-26 wrote them: ids are hashes of whole recipes, of fewer fields."""

import json
from typing import Any

from trainfit.spec.provenance import DIGEST, digest_of
from trainfit.spec.result import Record
from trainfit.spec.value import short_hash


def older_recipe(content: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's content without a field that it did not have yet."""
    return {name: value for name, value in content.items() if name != "loader"}


def older_line(record: Record, request_id: str = "") -> str:
    """Return the line of a record as it was written then; ``request_id`` replaces that of its outcome."""
    data = json.loads(record.model_dump_json())
    del data["previous_id"]
    today, data["recipe"] = data["recipe_id"], older_recipe(data["recipe"])
    data["recipe_id"] = short_hash(data["recipe"])
    if data["planned"]:
        data["planned"] = older_recipe(data["planned"])
    for part in ("estimate", "measurement"):
        if data[part] and data[part]["recipe_id"] == today:
            data[part]["recipe_id"] = data["recipe_id"]
    if request_id:
        data["outcome"]["request_id"] = request_id
    return json.dumps(data | {DIGEST: digest_of(data)})

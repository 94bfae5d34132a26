"""The table of speed: ours from records, the best other beside it."""

from evidence.scripts.tables import speed
from evidence.scripts.tables.joined import RESULTS


def test_rows_are_the_fastest_measured_steps_beside_what_is_cited() -> None:
    rows = {one.work: one for one in speed.every()}
    assert 5 <= len(rows) <= 13
    small = rows["Qwen2.5 0.5B, bf16"]
    assert str(small.tokens_per_s) in (RESULTS / small.made_by).read_text("utf-8")
    assert small.tokens_per_s >= 140_000
    assert (small.other_tokens_per_s, small.is_cited) == (149_500, True)
    assert f"| {small.ratio:.2f} |" in speed.readme()


def test_the_trainer_has_its_fastest_settings() -> None:
    lora, whole, fsdp2 = (one for one in speed.every() if not one.is_cited)
    assert (lora.other, round(lora.ratio, 2)) == ("Trainer with Liger", 1.46)
    assert (whole.other, round(whole.ratio, 2)) == ("Trainer, DDP and Liger", 1.22)
    assert round(fsdp2.ratio, 2) == 1.43  # As evidence/pages/accuracy.md says.

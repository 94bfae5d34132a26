"""The composed estimate: mixes of levels, growth with the batch, a host that decides."""

import pytest

from trainfit.planning.search.sizes import Batches, Sizes, within


def test_a_mix_of_two_levels_meets_the_limit() -> None:
    none = Sizes(10, 90, 0, 0, 0, micro_s=1.0)
    full = Sizes(10, 10, 0, 0, 0, micro_s=1.4)
    assert within((none, full), 100) == none
    mix = within((none, full), 60)
    assert mix is not None
    assert (mix.device_bytes, mix.micro_s) == pytest.approx((60, 1.2))
    assert within((none, full), 19) is None


def test_batches_whose_peak_is_the_updates_say_nothing_of_larger_ones() -> None:
    small = Sizes(10, 30, 40, 0, 0, micro_s=1.0)  # Whole gradients are the peak.
    large, larger = (Sizes(10, 5 * micro, 40, 0, 0, micro_s=micro) for micro in (8, 16))
    grown = Batches.of({1: small, 8: large, 16: larger})
    assert grown.moved(larger, 16, 32).device_bytes == pytest.approx(170)
    assert grown.moved(large, 8, 1).device_bytes == pytest.approx(40)
    assert grown.moved(small, 1, 8).device_bytes == pytest.approx(50)
    assert Batches.of({1: small}).batch_bytes == {1: 30}


def test_more_work_of_the_gpu_takes_no_longer_while_the_host_decides() -> None:
    eager = Sizes(0, 0, 0, 0, update_s=0.1, micro_s=0.2, host_s=1.0)
    grown = Batches({1: 1.0, 2: 2.0}, {1: 0.2, 2: 0.4})
    assert [grown.moved(eager, 1, micro).step_s(1) for micro in (1, 4, 8)] == pytest.approx([1.0, 1.0, 1.7])

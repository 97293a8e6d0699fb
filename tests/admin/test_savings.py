"""What conversion saves, scaled from what was measured."""

from gateway.admin.savings import Measurement, Savings


def test_savings_are_scaled_to_all_elements_that_were_converted() -> None:
    savings = Savings()
    savings.add("m", Measurement(converted_ms=10, untouched_ms=40, elements=100, at=5.0))
    assert savings.describe("m", 1000.0) == {
        "measured": {"converted_ms": 10, "untouched_ms": 40, "elements": 100, "at": 5.0},
        "saved_ms_estimate": 300.0,
    }


def test_loss_is_negative() -> None:
    savings = Savings()
    savings.add("m", Measurement(3.0, 1.0, 0))
    assert savings.describe("m", 10.0)["saved_ms_estimate"] == -20.0


def test_model_that_nobody_measured_has_no_estimate() -> None:
    assert Savings().describe("m", 10.0) == {"measured": None, "saved_ms_estimate": None}


def test_oldest_measurement_goes() -> None:
    savings = Savings()
    for number in range(1001):
        savings.add(f"m{number}", Measurement(1.0, 2.0, 1))
        savings.add("again", Measurement(1.0, 2.0, 1))
    assert savings.describe("m0", 1.0)["measured"] is None
    assert savings.describe("m1", 1.0)["measured"] is None
    assert savings.describe("m2", 1.0)["measured"] is not None
    assert savings.describe("again", 1.0)["measured"] is not None

from gateway.app.reload.revision import Revision


def test_revision_counts_reloads_and_failures() -> None:
    first = Revision(10.0, "f")
    assert (first.number, first.reloads, first.reload_failures, first.last_failure) == (
        1,
        0,
        0,
        None,
    )
    failed = first.after_failure("why", 20.0).after_failure("why not", 30.0)
    assert failed == Revision(10.0, "f", 1, "why not", 30.0, 0, 2)
    assert failed.after_reload(40.0) == Revision(40.0, "f", 2, None, None, 1, 2)

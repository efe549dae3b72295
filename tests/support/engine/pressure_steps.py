"""What tests of the scheduler under pressure make its engine know, expect and hold."""

LOW, MIDDLE, TOP = "background", "standard", "premium"


def reasons(engine):
    return [reason for _, reason, _ in engine.scheduler._report.figures.preempted]


def knows_steps(engine, fixed_s=0.0, stream_s=0.0, prompt_s=0.0):
    """The engine has learned that its steps take this, and learns nothing more."""
    times = engine.scheduler._times
    times.fixed_s, times.stream_s, times._prompt_s, times._steps = fixed_s, stream_s, prompt_s, 100
    times.observe = lambda shape, seconds: None


def expects(engine, tokens, tiers=(LOW, MIDDLE, TOP)):
    """Answers so far were of this length."""
    for tier in tiers:
        for _ in range(40):
            engine.scheduler._lengths.ended(tier, "", tokens)
    engine.scheduler._lengths.factor = 1.0


def full_of_the_lowest(stepped):
    """An engine whose memory streams of the lowest tier hold, of whom none has lost any."""
    engine = stepped(60)
    expects(engine, 1)
    for number in range(4):
        engine.add(f"low{number}", 120, 200, tier=LOW)
    while engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 1:
        engine.step()
    assert not engine.preempted
    expects(engine, 200)
    return engine

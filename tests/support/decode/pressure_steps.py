"""What tests of the scheduler under pressure make its engine know, expect and hold."""

from vllm.v1.request import RequestStatus

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


def one_has_lost_its_memory(engine, tokens):
    """Three streams, with prompts of so many tokens, run until the memory of one is taken; its name."""
    expects(engine, 1)
    for name in ("a", "b", "c"):
        engine.add(name, tokens, 100)
    while not engine.preempted:
        engine.step()
    return engine.preempted[0]


def one_with_an_objective_beside_others(engine, stream_s):
    """A stream of the top tier with an objective and eight of the lowest; each takes so much of a step."""
    knows_steps(engine, fixed_s=0.001, stream_s=stream_s)
    engine.add("urgent", 20, 60, tier=TOP, tpot_s=0.05)
    for number in range(8):
        engine.add(f"free{number}", 20, 60, tier=LOW)


def kv_is_on_its_way(engine, count):
    """So many streams of the lowest tier have memory, and wait for what is pulled into it."""
    scheduler = engine.scheduler
    for number in range(count):
        request = engine.add(f"pulled{number}", 20, 60, tier=LOW)
        scheduler.kv_cache_manager.allocate_slots(request, 20, delay_cache_blocks=True)
        scheduler.waiting.remove_request(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        scheduler.skipped_waiting.add_request(request)


def their_clients_leave(engine, count):
    """Those of `kv_is_on_its_way` are aborted, and what was pulled for them comes."""
    scheduler = engine.scheduler
    for number in range(count):
        scheduler.finished_recving_kv_req_ids.add(f"pulled{number}")
        scheduler.finish_requests(f"pulled{number}", RequestStatus.FINISHED_ABORTED)

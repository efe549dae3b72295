"""Which media messages may bring, held against the vLLM that is installed."""

import inspect
import json
import re

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest
from vllm.entrypoints import chat_utils
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from deployments.config.limits import LimitsConfig
from deployments.http.body.media import _MEDIA_PARTS, _NOT_SERVED, _TEXT_PARTS, MEDIA_KEYS, refuse_media
from deployments.http.body.reading import parse
from slo.errors import FieldError

LIMITS = LimitsConfig(media_domains=("pictures.example",))


def test_every_kind_of_part_of_vllms_is_decided_on():
    embeddings = {"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil"}
    kinds = _TEXT_PARTS | _MEDIA_PARTS
    assert set(chat_utils.MM_PARSER_MAP) == kinds | embeddings


def test_every_key_by_which_vllm_takes_media_is_decided_on():
    """It reads parts without a type by the keys that they have."""
    source = inspect.getsource(chat_utils._parse_chat_message_content_mm_part)
    keys = {*re.findall(r'"(\w+)" in part', source), *re.findall(r'[^_]part\.get\("(\w+)"', source)}
    assert keys - {"type", "uuid", "detail"} == MEDIA_KEYS | _NOT_SERVED | {"tool_reference"}


def refused(**fields):
    with pytest.raises(FieldError) as caught:
        parse(json.dumps({"model": "m", **fields}).encode(), ChatCompletionRequest, LIMITS)
    return caught.value


def say(*parts):
    return [{"role": "user", "content": "x"}, {"role": "user", "content": [*parts]}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}},
        {"type": "image_url", "image_url": "http://169.254.169.254/"},
        {"type": "input_image", "image_url": "https://elsewhere.example/a.png"},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "https://pictures.example.evil.example/a.png"}},
        {"type": "image_url", "image_url": {"url": "https://pictures.example@evil.example/a.png"}},
        {"type": "image_url", "image_url": {"url": "https://evil.example\\@pictures.example/"}},
        {"type": "image_url", "image_url": {"url": "https://[pictures.example/"}},
        {"type": "audio_url", "audio_url": {"url": " http://localhost:8265/api"}},
        {"type": "video_url", "video_url": {"url": "HTTP://localhost/v.mp4"}},
        {"type": "text", "text": "hi", "uuid": "1", "image_url": "http://localhost/"},
        {"image_url": "http://localhost/"},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "image_pil", "image_pil": None},
        {"type": ["image_url"], "image_url": "http://localhost/"},
        {"image_embeds": "AAAA"},
        {"text": "x", "name": "y", "image_pil": "http://localhost/a.png"},
        {"audio_url": None, "image_pil": "/etc/a.png"},
        {"type": "text", "text": "x", "image_pil": "http://localhost/a.png"},
        {"text": "x"},
    ],
)
def test_the_server_fetches_nothing_that_is_not_configured(part):
    assert refused(messages=say(part)).field == "messages[1].content"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None, "uuid": "x"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "x"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}, "uuid": ""},
        {"image_url": "https://pictures.example/a.png", "uuid": "x"},
        {"type": "text", "text": "hi", "uuid": "x"},
    ],
)
def test_no_part_names_what_it_is_cached_as(part):
    """The caches of media know no tenants: who gives the name of another's picture would be told of that."""
    error = refused(messages=say(part))
    assert error.field == "messages[1].content"
    assert "has a part with a uuid, which is not served; leave uuid out" in str(error)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "look at http://localhost/"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": None},
        {"type": "image_url", "image_url": {"url": "https://pictures.example:8443/a.png"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
)
def test_what_a_message_may_bring(part):
    refuse_media(say(part), LIMITS.media_domains, 1)


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def film(url, **kind):
    return {**kind, "video_url": {"url": url}}


def jpegs(frames):
    return "data:video/jpeg;base64," + ",".join(["AAAA"] * frames)


@pytest.mark.parametrize(
    ("video", "stands_for"),
    [
        (film(jpegs(5)), 5),
        (film(jpegs(5), type="video_url"), 5),
        (film(jpegs(33)), 33),
        ({"video_url": jpegs(3)}, 3),
        (film("data:Video/JPEG;base64,A,A"), 2),
        (film("data:video/jpeg;q=1;base64,A,A"), 32),
        (film("data:video/jpeg;q=1;base64" + ",A" * 40), 40),
        (film("data:video/mp4;base64,AAAA"), 32),
        ({"video_url": None, **PICTURE}, 1),
        (film("https://pictures.example/a.mp4"), 32),
        ({"type": "video_url", "video_url": None}, 32),
        ({"text": "x", "name": "y", "input_audio": SOUND["input_audio"]}, 1),
    ],
)
def test_media_are_counted_over_all_messages_and_kinds_and_frames(video, stands_for):
    """A small file may be a large picture, and vLLM has all of a request decoded at the same time."""
    messages = [*say(*[PICTURE] * 6), *say(*[SOUND] * 5), *say(video, {"type": "text", "text": "?"})]
    refuse_media(messages, LIMITS.media_domains, 11 + stands_for)
    with pytest.raises(FieldError) as caught:
        refuse_media([*messages, *say(PICTURE)], LIMITS.media_domains, 11 + stands_for)
    assert caught.value.field == "messages"
    assert str(caught.value).startswith(
        f"messages: has {12 + stands_for} images, sounds and frames of videos; limits.max_media allows "
        f"{11 + stands_for}, and a video that does not come as its frames (data:video/jpeg) counts as 32"
    )


def test_what_a_request_brings_is_no_more_pictures_than_a_request_may_have():
    for videos in ([jpegs(16)], [jpegs(8)] * 2):
        refuse_media(say(*map(film, videos)), (), LIMITS.max_media)
    for videos in ([jpegs(17)], [jpegs(9)] * 2, ["data:video/mp4;base64,AAAA"]):
        assert refused(messages=say(*map(film, videos))).field == "messages"


def test_vllm_takes_no_more_frames_of_a_video_unless_its_loader_does():
    assert VideoMediaIO(ImageMediaIO()).num_frames == 32

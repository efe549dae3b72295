import pytest

from slo.admission.tenants import ANONYMOUS, ApiKey, KeyRing, Tenant, digest
from slo.errors import AuthenticationError
from slo.tiers import BACKGROUND, PREMIUM


def test_without_keys_everybody_is_anonymous():
    assert KeyRing([]).tenant(None, 0.0) is ANONYMOUS
    assert KeyRing([]).tenant("anything", 0.0) is ANONYMOUS


def test_a_key_finds_its_tenant():
    acme, umbra = Tenant("acme", PREMIUM), Tenant("umbra", BACKGROUND)
    ring = KeyRing([ApiKey(digest("key-of-acme"), acme), ApiKey(digest("key-of-umbra"), umbra)])
    assert ring.tenant("key-of-acme", 0.0) is acme
    assert ring.tenant("key-of-umbra", 0.0) is umbra


@pytest.mark.parametrize("key", [None, "", "key-of-acm", "key-of-acme "])
def test_a_missing_or_wrong_key_is_refused(key):
    ring = KeyRing([ApiKey(digest("key-of-acme"), Tenant("acme", PREMIUM))])
    with pytest.raises(AuthenticationError):
        ring.tenant(key, 0.0)


def test_the_ring_keeps_no_key_in_clear():
    ring = KeyRing([ApiKey(digest("key-of-acme"), Tenant("acme", PREMIUM))])
    assert "key-of-acme" not in repr(vars(ring))


def test_a_key_is_refused_from_its_expiry_on():
    ring = KeyRing([ApiKey(digest("key-of-acme"), Tenant("acme"), expires_s=100.0)])
    assert ring.tenant("key-of-acme", 99.9).name == "acme"
    with pytest.raises(AuthenticationError, match="has expired; tenant acme"):
        ring.tenant("key-of-acme", 100.0)

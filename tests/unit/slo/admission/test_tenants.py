"""A key finds its tenant until it expires, and no other key does."""

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


def test_the_other_keys_are_not_looked_at():
    """A deployment may have thousands, and each request is held against them."""
    looked_at = []

    class Known(ApiKey):
        @property
        def digest(self):
            looked_at.append(self[0])
            return self[0]

    ring = KeyRing([Known(digest(f"key-{number}"), Tenant(f"{number}")) for number in range(100)])
    looked_at.clear()
    assert ring.tenant("key-50", 0.0).name == "50"
    with pytest.raises(AuthenticationError):
        ring.tenant("key-of-nobody", 0.0)
    assert len(looked_at) <= 2

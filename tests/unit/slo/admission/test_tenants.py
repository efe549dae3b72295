import pytest

from slo.admission.tenants import ANONYMOUS, KeyRing, Tenant
from slo.errors import AuthenticationError
from slo.tiers import BACKGROUND, PREMIUM


def test_without_keys_everybody_is_anonymous():
    assert KeyRing([]).tenant(None) is ANONYMOUS
    assert KeyRing([]).tenant("anything") is ANONYMOUS


def test_a_key_finds_its_tenant():
    acme, umbra = Tenant("acme", PREMIUM), Tenant("umbra", BACKGROUND)
    ring = KeyRing([("key-of-acme", acme), ("key-of-umbra", umbra)])
    assert ring.tenant("key-of-acme") is acme
    assert ring.tenant("key-of-umbra") is umbra


@pytest.mark.parametrize("key", [None, "", "key-of-acm", "key-of-acme "])
def test_a_missing_or_wrong_key_is_refused(key):
    ring = KeyRing([("key-of-acme", Tenant("acme", PREMIUM))])
    with pytest.raises(AuthenticationError):
        ring.tenant(key)


def test_the_ring_keeps_no_key_in_clear():
    ring = KeyRing([("key-of-acme", Tenant("acme", PREMIUM))])
    assert "key-of-acme" not in repr(vars(ring))

"""What nearly every test of the queue starts from."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from tests.given import Machine, Queued, Tenant, a_machine, a_tenant, work


@pytest.fixture
def tenant(engine: Engine) -> Tenant:
    """An organization with one workspace."""
    return a_tenant(engine)


@pytest.fixture
def machine(engine: Engine, tenant: Tenant) -> Machine:
    """An online machine of that organization."""
    return a_machine(engine, tenant)


@pytest.fixture
def queued(engine: Engine, tenant: Tenant, machine: Machine) -> Queued:
    """A session whose row waits for that machine."""
    return work(engine, tenant, machine)

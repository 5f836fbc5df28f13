-- 0001 core: the tenant, its machines, sessions, the dispatch queue, and what makes the guarantee hold.
--
-- Every key contains org_id: the organization is the unit of scale, so the schema can be distributed or partitioned by it.
-- Closed sets of values are CHECKs. Each index names the statement it serves. Each foreign key says why it deletes as it does.

-- ---------------------------------------------------------------------------------------------------------------------
-- The tenant (reference tables: small, read often, written by the operator)
-- ---------------------------------------------------------------------------------------------------------------------

create table organizations (
  id          uuid primary key,
  name        text not null unique check (length(name) between 1 and 120),
  created_at  timestamptz not null default now()
);

create table workspaces (
  org_id                   uuid not null references organizations (id) on delete restrict, -- a tenant with data is never removed in passing
  id                       uuid not null,
  linear_organization_id   text not null check (length(linear_organization_id) between 1 and 64),
  name                     text not null check (length(name) between 1 and 120),
  app_user_id              text,             -- the agent's own user in Linear; unknown until the operator or an event names it
  webhook_secret           text not null,    -- encrypted; the one that Linear signs with
  webhook_secret_previous  text,             -- encrypted; still valid while a rotation is under way
  linear_token             text,             -- encrypted; without it nothing can be synced back
  status                   text not null default 'active' check (status in ('active', 'revoked')),
  status_reason            text,
  created_at               timestamptz not null default now(),
  primary key (org_id, id),
  unique (org_id, linear_organization_id)
);
-- routing.workspaces_of: whose secret verifies this event? (several tenants may have connected one Linear organization)
create index workspaces_by_linear_organization on workspaces (linear_organization_id);

create table team_routes (
  org_id         uuid not null,
  workspace_id   uuid not null,
  team_id        text not null check (length(team_id) between 1 and 64),
  team_key       text,
  default_repo   text check (default_repo ~ '^[^/\s]+/[^/\s]+$'),
  auto_dispatch  boolean not null default true, -- off: nothing of this team starts work, whatever else matches
  primary key (org_id, workspace_id, team_id),
  foreign key (org_id, workspace_id) references workspaces (org_id, id) on delete cascade -- routes mean nothing without it
);

create table label_routes (
  org_id        uuid not null,
  workspace_id  uuid not null,
  team_id       text not null default '', -- '' with a label id; the team's id with a label name (names repeat between teams)
  label         text not null check (length(label) between 1 and 120),
  repo          text not null check (repo ~ '^[^/\s]+/[^/\s]+$'),
  primary key (org_id, workspace_id, team_id, label),
  foreign key (org_id, workspace_id) references workspaces (org_id, id) on delete cascade -- as above
);

create table project_routes (
  org_id        uuid not null,
  workspace_id  uuid not null,
  project       text not null check (length(project) between 1 and 200), -- the project's id or its name
  repo          text not null check (repo ~ '^[^/\s]+/[^/\s]+$'),
  primary key (org_id, workspace_id, project),
  foreign key (org_id, workspace_id) references workspaces (org_id, id) on delete cascade -- as above
);

-- ---------------------------------------------------------------------------------------------------------------------
-- Machines
-- ---------------------------------------------------------------------------------------------------------------------

create table orchestrators (
  org_id               uuid not null references organizations (id) on delete restrict, -- as for workspaces
  id                   uuid not null,
  name                 text not null check (length(name) between 1 and 120),
  max_concurrent_jobs  integer not null default 4 check (max_concurrent_jobs between 1 and 64),
  active_jobs          integer check (active_jobs >= 0),    -- what the machine last said of itself; shown, never decided on
  last_heartbeat_at    timestamptz,
  created_at           timestamptz not null default now(),
  primary key (org_id, id),
  unique (org_id, name)
) with (fillfactor = 70); -- heartbeats change no indexed column: room on the page keeps them out of the indexes

create table repo_routes (
  org_id           uuid not null,
  repo             text not null check (repo ~ '^[^/\s]+/[^/\s]+$'),
  orchestrator_id  uuid not null,
  source           text not null default 'machine' check (source in ('machine', 'operator')), -- a registration replaces only its own
  primary key (org_id, repo, orchestrator_id), -- orchestrators.route and dispatch_queue.reroute: who serves this repo?
  foreign key (org_id, orchestrator_id) references orchestrators (org_id, id) on delete cascade -- a machine's routes go with it
);
-- orchestrators.register: replace this machine's routes
create index repo_routes_by_orchestrator on repo_routes (org_id, orchestrator_id);

create table orchestrator_tokens (
  org_id           uuid not null references organizations (id) on delete restrict, -- as for workspaces
  id               uuid not null,
  token_hash       text not null check (token_hash ~ '^[0-9a-f]{64}$'), -- SHA-256; the token itself is nowhere
  prefix           text not null check (length(prefix) = 12),           -- shown to tell tokens apart
  label            text,
  orchestrator_id  uuid,                                                -- bound by the first registration
  created_at       timestamptz not null default now(),
  expires_at       timestamptz,
  last_used_at     timestamptz,                                         -- to the minute
  revoked_at       timestamptz,
  primary key (org_id, id),
  unique (token_hash, org_id), -- orchestrators.authenticate: whose token is this? (leads with the hash: the tenant is what we ask for)
  foreign key (org_id, orchestrator_id) references orchestrators (org_id, id) on delete cascade -- a removed machine's tokens must not live on
) with (fillfactor = 70);

-- ---------------------------------------------------------------------------------------------------------------------
-- Sessions and their history
-- ---------------------------------------------------------------------------------------------------------------------

create table dispatch_sessions (
  org_id                   uuid not null,
  id                       uuid not null,
  workspace_id             uuid not null,
  orchestrator_id          uuid,   -- the machine that the work is meant for or went to last; follows the queue row
  linear_issue_id          text not null check (length(linear_issue_id) between 1 and 64),
  linear_identifier        text not null check (length(linear_identifier) between 1 and 64),
  linear_agent_session_id  text,
  team_id                  text not null,
  title                    text not null,
  url                      text,
  repo                     text,
  status                   text not null default 'pending' check (status in
                             ('pending',    -- waits in the queue
                              'dispatched', -- claimed by a machine
                              'running',    -- that machine has reported
                              'complete', 'error', 'cancelled')), -- over
  progress_percent         integer check (progress_percent between 0 and 100),
  pr_url                   text,
  summary                  text,
  tokens_used              bigint check (tokens_used >= 0),
  cost_usd                 numeric(14, 6) check (cost_usd >= 0),
  error_code               text check (error_code in ('failed', 'attempts_exhausted', 'no_route', 'no_orchestrator')),
  error_message            text,
  traceparent              text,
  requested_at             timestamptz not null default now(), -- when it was asked for, by Linear's clock: an older stop is not meant for it
  created_at               timestamptz not null default now(),
  updated_at               timestamptz not null default now(),
  started_at               timestamptz, -- first claim
  ended_at                 timestamptz,
  primary key (org_id, id),
  constraint session_is_over_when_it_has_ended check ((ended_at is not null) = (status in ('complete', 'error', 'cancelled'))),
  foreign key (org_id, workspace_id) references workspaces (org_id, id) on delete restrict,     -- history outlives a disconnected workspace
  foreign key (org_id, orchestrator_id) references orchestrators (org_id, id) on delete set null (orchestrator_id) -- and a machine
) with (
  fillfactor = 80, -- the way pending -> dispatched -> running changes no indexed column (the predicates below ask ended_at, not status)
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
-- sessions.open_session: one piece of work per issue at a time (three webhooks of one delegation meet here)
create unique index one_open_session_per_issue on dispatch_sessions (org_id, workspace_id, linear_issue_id) where ended_at is null;
-- session_history.latest_of_issue; sessions.open_session: is this start an echo of the last session?
create index sessions_by_issue on dispatch_sessions (org_id, workspace_id, linear_issue_id, id desc);
-- session_history.of_agent_session: a prompt or a stop names only Linear's agent session
create index sessions_by_agent_session on dispatch_sessions (org_id, workspace_id, linear_agent_session_id)
  where linear_agent_session_id is not null;
-- Newest first needs no index of its own: ids are made in the order of time, so it is the primary key read backwards.

create table session_events (
  org_id           uuid not null,
  session_id       uuid not null,
  id               bigint generated always as identity,
  type             text not null check (type in
                     ('created', 'dispatched', 'progress', 'complete', 'error', 'cancelled', 'telemetry',
                      'claimed', 'released', 'rerouted', 'dead_lettered', 'redriven', 'prompted', 'stop_requested', 'updated')),
  orchestrator_id  uuid,    -- whose deed it was; no foreign key: history outlives the machine
  queue_id         uuid,    -- with attempt: which claim; the row itself is long gone when this is read
  attempt          integer,
  data             jsonb,
  created_at       timestamptz not null default clock_timestamp(),
  primary key (org_id, session_id, id), -- session_history.timeline
  foreign key (org_id, session_id) references dispatch_sessions (org_id, id) on delete cascade -- a session's history is part of it
);
-- A claim is (queue id, attempt): the database refuses to record the same one twice, whatever the code does.
-- Also session_history.session_once_claimed: a late report names a queue row that is gone; who held it?
create unique index one_claim_per_attempt on session_events (org_id, queue_id, attempt) where type = 'claimed';
-- dead_letters.dead_letters: newest first
create index dead_letters_by_age on session_events (org_id, id desc) where type = 'dead_lettered';
-- sessions.record_event: two deliveries of one activity are one input
create unique index one_prompt_per_activity on session_events (org_id, (data ->> 'activityId')) where type = 'prompted';

-- ---------------------------------------------------------------------------------------------------------------------
-- The queue: a row exists exactly as long as its session still has to be delivered
-- ---------------------------------------------------------------------------------------------------------------------

create table dispatch_queue (
  org_id               uuid not null,
  id                   uuid not null,
  orchestrator_id      uuid not null,
  session_id           uuid not null,
  payload              jsonb not null,
  attempts             integer not null default 0 check (attempts >= 0), -- how often claimed; only a claim changes it
  available_at         timestamptz not null default now(),
  claimed_at           timestamptz,
  claimed_by           uuid,    -- the machine of the last attempt; stays after a release, so that its late completion is still known
  cancel_requested_at  timestamptz,
  last_error           text,
  created_at           timestamptz not null default now(),
  primary key (org_id, id), -- claim, renew, release by id
  constraint one_row_per_session unique (org_id, session_id), -- enqueue's guard; settle, cancel, report by session
  constraint a_claim_counts_as_an_attempt check (claimed_at is null or (attempts > 0 and claimed_by is not null)),
  constraint only_a_claim_can_be_asked_to_stop check (cancel_requested_at is null or claimed_at is not null),
  foreign key (org_id, session_id) references dispatch_sessions (org_id, id) on delete restrict, -- work under way is not deleted
  foreign key (org_id, orchestrator_id) references orchestrators (org_id, id) on delete restrict -- re-route or cancel first
) with (
  -- A row lives for minutes and dies: vacuum by count, at once and without pauses, or the claim's index scan walks over the dead.
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0,
  autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000
);
-- poll and claim, in exactly their order: a machine's own waiting rows, oldest first; rows of others are never read
create index queue_waiting on dispatch_queue (org_id, orchestrator_id, available_at, id) where claimed_at is null;
-- sweep: a machine's expired claims, oldest first; claim: how many does it hold? (at most its limit, so at most 64 entries)
create index queue_claimed on dispatch_queue (org_id, orchestrator_id, claimed_at) where claimed_at is not null;

-- All indexes begin with org_id, so the planner must not believe that a tenant has no rows. With statistics it does, for every tenant
-- (or machine) that came after the last ANALYZE: it then takes any index for the right one and reads all of the tenant's rows (measured:
-- 5 ms instead of 0.03 to look up one issue among 9 400). Without statistics it assumes 200 tenants, and the longest match wins.
alter table dispatch_sessions alter column org_id set statistics 0, alter column workspace_id set statistics 0,
                              alter column orchestrator_id set statistics 0;
alter table session_events alter column org_id set statistics 0, alter column orchestrator_id set statistics 0;
alter table dispatch_queue alter column org_id set statistics 0, alter column orchestrator_id set statistics 0;

-- ---------------------------------------------------------------------------------------------------------------------
-- What has already been heard from Linear
-- ---------------------------------------------------------------------------------------------------------------------

create table webhook_deliveries (
  org_id        uuid not null,
  workspace_id  uuid not null,
  content_key   text not null,    -- SHA-256 of the signed bytes: the delivery id is a header, and headers are not signed
  delivery_id   text,
  event         text not null,
  outcome       text not null,    -- what has come of it, for whoever asks why an event did nothing
  received_at   timestamptz not null default now(),
  primary key (org_id, content_key),
  foreign key (org_id, workspace_id) references workspaces (org_id, id) on delete cascade -- only a memory of duplicates
);
-- deliveries.remember: the same delivery id again
create unique index one_delivery_per_id on webhook_deliveries (org_id, delivery_id) where delivery_id is not null;
-- deliveries.purge: oldest first
create index deliveries_by_age on webhook_deliveries (received_at);

create table stop_tombstones (
  org_id        uuid not null,
  workspace_id  uuid not null,
  subject       text not null,         -- Linear's agent session id or issue id
  stopped_at    timestamptz not null,  -- the event's own time: an older start is not to be followed
  received_at   timestamptz not null default now(),
  primary key (org_id, workspace_id, subject),
  foreign key (org_id, workspace_id) references workspaces (org_id, id) on delete cascade -- as above
);
-- deliveries.purge: oldest first
create index tombstones_by_age on stop_tombstones (received_at);
alter table webhook_deliveries alter column org_id set statistics 0; -- as for the queue

-- ---------------------------------------------------------------------------------------------------------------------
-- The window, refused by the database itself
-- ---------------------------------------------------------------------------------------------------------------------

-- Checked at COMMIT: a session that is not over has its queue row, and a session that is over has none. A transaction that
-- forgot one half does not commit, whoever wrote it. Fires only where one half appears or goes: a claim or a release costs nothing.
create function refuse_the_window() returns trigger language plpgsql as $$
declare
  org uuid;
  session uuid;
  open boolean;
  queued boolean;
begin
  if tg_table_name = 'dispatch_sessions' then
    org := new.org_id; session := new.id;
  elsif tg_op = 'DELETE' then
    org := old.org_id; session := old.session_id;
  else
    org := new.org_id; session := new.session_id;
  end if;
  open := exists (select from dispatch_sessions s where s.org_id = org and s.id = session and s.ended_at is null);
  queued := exists (select from dispatch_queue q where q.org_id = org and q.session_id = session);
  if open and not queued then
    raise exception 'session % is to be delivered, but has no queue row', session using errcode = 'DQ001';
  elsif queued and not open then
    raise exception 'session % is over, but still has a queue row', session using errcode = 'DQ002';
  end if;
  return null;
end $$;

create constraint trigger session_opened after insert on dispatch_sessions
  deferrable initially deferred for each row when (new.ended_at is null) execute function refuse_the_window();
create constraint trigger session_ended_or_reopened after update of ended_at on dispatch_sessions
  deferrable initially deferred for each row when ((old.ended_at is null) <> (new.ended_at is null)) execute function refuse_the_window();
create constraint trigger row_enqueued after insert on dispatch_queue
  deferrable initially deferred for each row execute function refuse_the_window();
create constraint trigger row_gone after delete on dispatch_queue
  deferrable initially deferred for each row execute function refuse_the_window();

-- Rows that contradict the guarantee: always none. Asserted by the tests, shown by `dispatchctl doctor`.
create view dispatch_invariants as
  select s.org_id, s.id as session_id, null::uuid as queue_id, 'a session to be delivered has no queue row' as violation
    from dispatch_sessions s
   where s.ended_at is null and not exists (select from dispatch_queue q where q.org_id = s.org_id and q.session_id = s.id)
  union all
  select q.org_id, q.session_id, q.id, 'a session that is over still has a queue row'
    from dispatch_queue q join dispatch_sessions s on s.org_id = q.org_id and s.id = q.session_id
   where s.ended_at is not null
  union all
  select q.org_id, q.session_id, q.id, 'the session says ' || s.status || ', but its row is ' || case when q.claimed_at is null then 'waiting' else 'claimed' end
    from dispatch_queue q join dispatch_sessions s on s.org_id = q.org_id and s.id = q.session_id
   where s.ended_at is null and (q.claimed_at is null) <> (s.status = 'pending')
  union all
  select q.org_id, q.session_id, q.id, 'the session and its row name different machines'
    from dispatch_queue q join dispatch_sessions s on s.org_id = q.org_id and s.id = q.session_id
   where s.orchestrator_id is distinct from q.orchestrator_id
  union all
  select q.org_id, q.session_id, q.id, 'the row counts ' || q.attempts || ' attempts, the history ' || count(e.id)
    from dispatch_queue q left join session_events e
      on e.org_id = q.org_id and e.session_id = q.session_id and e.queue_id = q.id and e.type = 'claimed'
   group by q.org_id, q.session_id, q.id, q.attempts
  having q.attempts <> count(e.id);

-- ---------------------------------------------------------------------------------------------------------------------
-- What has to leave the database after a commit. In the schema whatever destination is configured, so that changing one
-- never drops the memory of what was published.
-- ---------------------------------------------------------------------------------------------------------------------

create table dispatch_ledger (
  org_id           uuid not null references organizations (id) on delete restrict, -- as for workspaces
  dispatch_id      uuid not null,
  destination      text not null,
  job              text not null,
  idempotency_key  text check (length(idempotency_key) between 1 and 512),
  payload          jsonb,
  options          jsonb,
  secret           boolean not null default false,
  wrapped_key      jsonb,
  status           text not null default 'pending' check (status in ('pending', 'accepted', 'failed', 'completed')),
  attempts         integer not null default 0 check (attempts >= 0),
  available_at     timestamptz not null default now(),
  lease_token      uuid,
  leased_until     timestamptz,
  adapter_job_id   text,
  last_error       text,  -- an error class of ours, never a provider's text
  accepted_at      timestamptz,
  completed_at     timestamptz,
  failed_at        timestamptz,
  created_at       timestamptz not null default now(),
  updated_at       timestamptz not null default now(),
  primary key (org_id, dispatch_id),
  unique (org_id, destination, job, idempotency_key),
  constraint a_lease_has_an_end check ((lease_token is null) = (leased_until is null))
);
-- ledger.drain: due intents, oldest first; receipts are not in it, however many are kept
create index ledger_due on dispatch_ledger (available_at) where status = 'pending';

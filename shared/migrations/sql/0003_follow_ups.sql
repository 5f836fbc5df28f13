-- What people ask for while a machine is at work must not go with the row when that work ends. Only additions: older code runs on it.

-- How many follow-ups the message held when it was claimed: those that came later have been read by nobody when the claim ends.
alter table dispatch_queue add column prompts_told integer not null default 0 check (prompts_told >= 0);
-- Asked for again while a stop is pending: the end of the stopped claim begins the work anew, instead of ending it.
alter table dispatch_queue add column wanted_again boolean not null default false;
alter table dispatch_queue add constraint only_what_was_stopped_is_wanted_again check (not wanted_again or cancel_requested_at is not null);

-- Whether a person named the repository: then a move of the issue to another team does not choose another one.
alter table dispatch_sessions add column repo_was_said boolean not null default false;

-- Agent sessions of Linear that joined work which had another one already: a stop or a prompt in them is meant for it.
create table joined_agent_sessions (
  org_id            uuid not null,
  workspace_id      uuid not null,
  agent_session_id  text not null,
  session_id        uuid not null,
  primary key (org_id, workspace_id, agent_session_id), -- session_history.of_agent_session; the last one joined counts
  foreign key (org_id, session_id) references dispatch_sessions (org_id, id) on delete cascade -- as the session's history
);
-- the foreign key's cascade
create index joined_by_session on joined_agent_sessions (org_id, session_id);
alter table joined_agent_sessions alter column org_id set statistics 0, alter column workspace_id set statistics 0; -- as for the queue

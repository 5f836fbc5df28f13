-- 0002 listen: a commit can name the machine that has something to look at, so that a waiting poll is answered at once.
--
-- Off until the operator says `listen on`: a transaction that notifies takes a lock of the whole server from there to the end of its
-- COMMIT, so writers pass one after the other (at 8 of them half as many enqueues). Nobody should pay for that whom nobody hears.

-- The payload is an id and nothing else: whoever may connect may listen. One transaction says the same thing once, however many rows.
create function tell_the_machine() returns trigger language plpgsql as $$
begin
  perform pg_notify('dispatch_queue', new.orchestrator_id::text);
  return null;
end $$;

create trigger machine_is_told_of_a_new_row after insert on dispatch_queue
  for each row execute function tell_the_machine();
-- Re-routed to it, given back by it (it is due later), or to be stopped by it. A claim, a renewal and a follow-up tell nobody.
create trigger machine_is_told_of_a_change after update of orchestrator_id, claimed_at, cancel_requested_at on dispatch_queue
  for each row when (new.claimed_at is null or (new.cancel_requested_at is not null and old.cancel_requested_at is null))
  execute function tell_the_machine();

alter table dispatch_queue disable trigger machine_is_told_of_a_new_row, disable trigger machine_is_told_of_a_change;

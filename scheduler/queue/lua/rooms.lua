-- The rooms of the sessions that one pop names, and what it has taken of each.
local ROOM_SIZE = 9 -- arguments of one session
local rooms, largest_capacity = {}, 0
local starving -- the one generation whose session is closed to every class

local function open_room(first, earmarked_until)
  local room = {
    session = ARGV[first], max_entries = {}, max_tokens = {}, capacity = tonumber(ARGV[first + 7]),
    max_charged = tonumber(ARGV[first + 8]), num_popped = 0, tokens_popped = 0, num_charged = 0
  }
  for rank = 0, NUM_CLASSES - 1 do
    room.max_entries[rank] = tonumber(ARGV[first + 1 + rank])
    room.max_tokens[rank] = tonumber(ARGV[first + 4 + rank])
  end
  largest_capacity = math.max(largest_capacity, room.capacity)
  local generation = call('HGET', EARMARKS, room.session)
  if generation then
    set_earmark(room.session, generation, earmarked_until)
    room.earmark, room.earmarked = generation, find(generation)
    room.earmark_rank = starving == generation and 0 or room.earmarked.rank
  end
  rooms[#rooms + 1] = room
end

local function is_older(generation, entry, other, other_entry)
  if entry.arrival ~= other_entry.arrival then
    return entry.arrival < other_entry.arrival
  end
  return is_before(generation, other)
end

-- Whether the session could take this entry, or one of this lane, if it were small enough. What a wish asks for: the rank it
-- is judged by (0 for what goes as urgent), charged, whether by the rule of age (then the earmark of a younger one is no
-- obstacle), and of one entry the generation and the entry.
local function is_open(room, wish)
  if room.num_popped >= room.max_entries[wish.rank] or (wish.charged == 1 and room.num_charged >= room.max_charged) then
    return false
  elseif not room.earmark or wish.rank < room.earmark_rank or room.earmark == wish.generation then
    return true
  elseif not wish.is_aged or room.earmark_rank < room.earmarked.rank then
    return false
  end
  return not wish.generation or is_older(wish.generation, wish.entry, room.earmark, room.earmarked)
end

local function is_lane_open(rank, charged, is_aged)
  for _, room in ipairs(rooms) do
    if is_open(room, {rank = rank, charged = charged, is_aged = is_aged}) then
      return true
    end
  end
  return false
end

local function tokens_left(room, rank)
  return room.max_tokens[rank] - room.tokens_popped
end

local function fits(room, wish)
  return is_open(room, wish) and wish.entry.max_tokens <= tokens_left(room, wish.rank)
end

-- When it is empty.
local function could_hold(room, entry)
  return room.capacity >= entry.max_tokens and (entry.charged == 0 or room.max_charged > 0)
end

-- The one with most tokens left, the first of equals, of the rooms that `is_able` accepts.
local function roomiest(rank, is_able)
  local best
  for _, room in ipairs(rooms) do
    if is_able(room) and (not best or tokens_left(room, rank) > tokens_left(best, rank)) then
      best = room
    end
  end
  return best
end
